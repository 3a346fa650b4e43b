"""A candidate with all that pricing it needs: its chain, its strategy tables, its rows; and how a plan is written down.

Tables come from a ``TableSource``, lazily: a candidate that is never looked at costs no inner search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.memory import precision as policy_of
from autoplan.plans import Alternative, Fingerprint, LayerPlan, Plan, PrecisionName, Proof, Recompute
from autoplan.search.chain import Chain
from autoplan.search.layer_row import Row, Setting, allowed_zero
from autoplan.search.rows import Agreement, agreements, rows_of
from autoplan.search.space import Candidate, Pins
from autoplan.search.step_model import price_layers
from autoplan.search.table import StrategyCost

# (class_id, candidate) -> the strategies of that class at the candidate's tensor degree and micro-batch
TableSource = Callable[[str, Candidate], tuple[StrategyCost, ...]]
ChainSource = Callable[[int], Chain]  # micro_batch -> the chain with its values priced for it


@dataclass(frozen=True, kw_only=True)
class Context:
    """One candidate. ``rows`` holds what the pins allow of every class."""

    candidate: Candidate
    setting: Setting
    chain: Chain
    tables: Mapping[str, tuple[StrategyCost, ...]]
    rows: Mapping[str, tuple[Row, ...]]
    agreed: tuple[Agreement, ...]
    fingerprint: Fingerprint
    fused_matmul: bool = False

    def row(self, cost: StrategyCost, zero: int, recompute: Recompute) -> Row:
        """The priced row of one decision."""
        index = self._index
        return index[cost.strategy.key, zero, recompute]

    def row_of(self, layer: LayerPlan) -> Row:
        return self._index[layer.strategy, layer.zero, layer.recompute]

    def __post_init__(self) -> None:
        index = {(r.cost.strategy.key, r.zero, r.recompute): r for table in self.rows.values() for r in table}
        object.__setattr__(self, "_index", index)

    _index: Mapping[tuple[str, int, str], Row] = field(init=False, repr=False, compare=False)

    def plan(self, rows: Sequence[Row], cuts: Sequence[int], name: str) -> Plan:
        used = {row.cost.strategy.key: row.cost.strategy for row in rows}
        return Plan(
            fingerprint=self.fingerprint,
            degrees=self.candidate.degrees,
            micro_batch=self.candidate.micro_batch,
            micro_batches=self.candidate.micro_batches,
            schedule=self.candidate.schedule,
            precision=self.setting.precision.name,  # type: ignore[arg-type]  # a policy's name is a PrecisionName
            cuts=tuple(cuts),
            fused_matmul=self.fused_matmul and self.candidate.degrees.tensor > 1,
            layers=tuple(
                LayerPlan(strategy=r.cost.strategy.key, zero=r.zero, recompute=r.recompute)  # type: ignore[arg-type]
                for r in rows
            ),
            strategies=tuple(used[key] for key in sorted(used)),
            name=name,
        )

    def priced(self, rows: Sequence[Row], cuts: Sequence[int], name: str, proof: Proof | None = None) -> Alternative:
        """A plan of this candidate with its estimate."""
        estimate = price_layers(rows, cuts, self.chain, self.setting, proof or Proof(status="priced"))
        return Alternative(plan=self.plan(rows, cuts, name), estimate=estimate)


@dataclass(kw_only=True)
class Contexts:
    """Makes contexts, each once, from what candidates have in common."""

    cluster: Cluster
    precision: PrecisionName
    fingerprint: Fingerprint
    chains: ChainSource
    tables: TableSource
    pins: Pins = field(default_factory=Pins)
    relaxed_tables: TableSource | None = None  # rows that no strategy beats, cheap to make; None: there are none
    _known: dict[Candidate, Context] = field(init=False, repr=False, default_factory=dict)

    def of(self, candidate: Candidate) -> Context:
        if candidate not in self._known:
            self._known[candidate] = self._make(candidate)
        return self._known[candidate]

    def relaxed(self, candidate: Candidate) -> Context | None:
        """A context in which every plan is at least as good as its like in ``of(candidate)``."""
        return None if self.relaxed_tables is None else self._make(candidate, self.relaxed_tables)

    def _make(self, candidate: Candidate, source: TableSource | None = None) -> Context:
        chain = self.chains(candidate.micro_batch)
        tables = {class_id: (source or self.tables)(class_id, candidate) for class_id in chain.classes}
        setting = Setting(
            cluster=self.cluster,
            degrees=candidate.degrees,
            micro_batch=candidate.micro_batch,
            micro_batches=candidate.micro_batches,
            schedule=candidate.schedule,
            precision=policy_of(self.precision),
        )
        highest = allowed_zero(candidate.degrees.data)[-1]  # with one data rank there is nothing to shard
        zeros: Iterable[int] | None = None if self.pins.zero is None else (min(self.pins.zero, highest),)
        recomputes: tuple[Recompute, ...] = ("none", "full") if self.pins.recompute is None else (self.pins.recompute,)
        return Context(
            candidate=candidate,
            setting=setting,
            chain=chain,
            tables=tables,
            rows=rows_of(chain, tables, setting, zeros=zeros, recomputes=recomputes),
            agreed=agreements(chain, tables),
            fingerprint=self.fingerprint,
            fused_matmul=bool(self.pins.fused_matmul),
        )
