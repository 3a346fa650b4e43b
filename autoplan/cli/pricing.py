"""The price of one plan whose decisions are all given."""

from __future__ import annotations

from autoplan import api
from autoplan.capture import capture
from autoplan.cli.progress import Tell
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import DegreeError
from autoplan.models import ModelSpec
from autoplan.plans import SCHEMA_VERSION, PlanDocument, PrecisionName
from autoplan.search.hand_plans import Uniform, rank
from autoplan.search.planner import problem_of
from autoplan.search.space import Pins


def price_fixed(
    spec: ModelSpec,
    cluster: Cluster,
    global_batch: int,
    seq: int | None,
    precision: PrecisionName,
    pins: Pins,
    tell: Tell,
) -> PlanDocument:
    """Price the plan that ``pins`` describe, with whichever uniform tensor partition is best.

    Raises DegreeError or BatchError where it cannot be; one that does not fit is priced all the same.
    """
    seq = spec.seq(seq)
    tell("capturing the model")
    batch, dtype = spec.batch(global_batch, seq), api.DTYPES[precision]
    graph = capture(spec.meta_model(), batch, precision=dtype, folded=True, finely=True)
    problem = problem_of(graph, cluster, global_batch=global_batch, seq=seq, precision=precision, model_name=spec.name)
    (candidate,) = problem.space(pins).candidates
    tell("pricing")
    plans = list(Uniform(problem.contexts(pins)).plans(candidate))
    if not plans:
        raise DegreeError(f"{spec.name} cannot be run as {pins}: data {candidate.degrees.data} shards nothing for ZeRO")
    best = min(plans, key=rank)
    return PlanDocument(schema_version=SCHEMA_VERSION, plan=best.plan, estimate=best.estimate)
