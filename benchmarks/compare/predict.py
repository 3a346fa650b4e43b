"""What a plan is said to take: by the sums that the search ranks with, and by replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.capture.graph import Graph
from autoplan.cost_models.cluster import Cluster
from autoplan.plans import Alternative, Plan
from autoplan.replay import Rehearsal, Replay, rehearse
from autoplan.runtime.optimizer import OptimizerFactory
from benchmarks.compare.results import Prediction, Span


@dataclass(kw_only=True)
class Predictor:
    """Replays plans of one graph on one cluster, each rehearsed once."""

    graph: Graph
    cluster: Cluster
    optimizer: OptimizerFactory
    _known: dict[Plan, Rehearsal] = field(init=False, repr=False, default_factory=dict)

    def replay(self, plan: Plan, slowdown: float = 1.0) -> Replay:
        if plan not in self._known:
            self._known[plan] = rehearse(self.graph, plan, self.cluster, optimizer=self.optimizer)
        return self._known[plan].replay(slowdown)

    def fits(self, plan: Plan) -> bool:
        return self.replay(plan).fits

    def of(self, alternative: Alternative) -> Prediction:
        ran = self.replay(alternative.plan)
        return Prediction(
            step_us=ran.step_us,
            sums_us=alternative.estimate.step_us,
            tensor_bytes=ran.tensor_bytes,
            sums_bytes=tuple(stage.total_bytes for stage in alternative.estimate.memory),
            reserved_bytes=ran.reserved_bytes,
            limit_bytes=self.cluster.memory_bytes,
            spans=tuple(
                Span(stage=s.stage, name=s.name, start_us=s.start_us, end_us=s.end_us, exposed_us=s.exposed_us)
                for s in ran.spans
            ),
        )
