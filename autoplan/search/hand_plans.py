"""What a careful person would try: the plans that autoplan must not lose to, always priced, whether they fit or not.

    ddp, zero-1, zero-2, zero-3     data parallel over all devices, everything replicated but what ZeRO shards
    fsdp+tp                         tensor parallel inside a node, ZeRO-3 over the rest
    megatron-3d                     tensor parallel inside a node, pipeline, data; 1F1B; plain data parallel or ZeRO-1
    megatron-3d recompute           the same with every layer recomputed

For each the degrees, the micro-batch, sequence parallelism and (where the name does not say) recompute are those of
the fastest plan that fits; where none fits, of the one nearest to fitting. One decision holds for all layers, and
cuts are balanced: that is what is asked of a person.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from msgspec import structs

from autoplan.errors import DegreeError
from autoplan.plans import Alternative, Recompute
from autoplan.search.context import Context, Contexts
from autoplan.search.fixed import fix, kinds_of
from autoplan.search.layer_row import RECOMPUTE, allowed_zero
from autoplan.search.space import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class HandPlan:
    """One recipe: which candidates it considers, and what it decides for every layer."""

    name: str
    considers: Callable[[Candidate, int], bool]  # candidate, devices of a node
    zeros: tuple[int, ...]
    recomputes: tuple[Recompute, ...] = RECOMPUTE


def _data_only(candidate: Candidate, node: int) -> bool:
    return candidate.degrees.pipe == candidate.degrees.tensor == 1


def _sharded(candidate: Candidate, node: int) -> bool:
    return candidate.degrees.pipe == 1 and 1 < candidate.degrees.tensor <= node


def _megatron(candidate: Candidate, node: int) -> bool:
    degrees = candidate.degrees
    return candidate.schedule == "1f1b" and degrees.tensor <= node and degrees.tensor * degrees.pipe > 1


HAND_PLANS = (
    HandPlan(name="ddp", considers=_data_only, zeros=(0,)),
    HandPlan(name="zero-1", considers=_data_only, zeros=(1,)),
    HandPlan(name="zero-2", considers=_data_only, zeros=(2,)),
    HandPlan(name="zero-3", considers=_data_only, zeros=(3,)),
    HandPlan(name="fsdp+tp", considers=_sharded, zeros=(3,)),
    HandPlan(name="megatron-3d", considers=_megatron, zeros=(0, 1), recomputes=("none",)),
    HandPlan(name="megatron-3d recompute", considers=_megatron, zeros=(0, 1), recomputes=("full",)),
)

# For each class the first of these that its table has: an embedding may lack the sequence-parallel form, say.
_PREFERENCES = (
    ("replicated",),
    ("batch", "replicated"),
    ("tensor", "batch", "replicated"),
    ("tensor+sequence", "tensor", "batch", "replicated"),
)


class Uniform:
    """Plans with one decision for all layers and balanced cuts, each priced once."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self._known: dict[tuple[Candidate, int, int, str], Alternative | None] = {}

    def plans(
        self, candidate: Candidate, zeros: Sequence[int] | None = None, recomputes: Sequence[Recompute] = RECOMPUTE
    ) -> Iterator[Alternative]:
        """Every kind of partition with these ZeRO stages (all that differ, if None) and recompute choices."""
        pins = self.contexts.pins
        allowed = allowed_zero(candidate.degrees.data)
        stages = dict.fromkeys(min(zero, allowed[-1]) for zero in (allowed if zeros is None else zeros))
        pinned = None if pins.zero is None else min(pins.zero, allowed[-1])
        kinds = range(1) if candidate.degrees.tensor == 1 else range(len(_PREFERENCES))
        for kind in kinds:
            for zero in stages:
                for recompute in recomputes:
                    if pinned in (None, zero) and pins.recompute in (None, recompute):
                        made = self._plan(candidate, kind, zero, recompute)
                        if made is not None:
                            yield made

    def _plan(self, candidate: Candidate, kind: int, zero: int, recompute: Recompute) -> Alternative | None:
        key = (candidate, kind, zero, recompute)
        if key not in self._known:
            context = self.contexts.of(candidate)
            kinds = _kinds(context, kind)
            name = f"{_PREFERENCES[kind][0]}, zero {zero}" + (", recompute" if recompute == "full" else "")
            try:
                self._known[key] = (
                    fix(context, kinds=kinds, zero=zero, recompute=recompute, name=name) if kinds else None
                )
            except DegreeError:  # tied parameters cannot be placed alike in these kinds
                self._known[key] = None
        return self._known[key]


def _kinds(context: Context, kind: int) -> list[str] | None:
    """The kind of every layer; None where a simpler preference says the same."""

    def of(preference: tuple[str, ...]) -> dict[str, str]:
        return {
            class_id: next(k for k in (*preference, *kinds_of(context, class_id)) if k in kinds_of(context, class_id))
            for class_id in context.chain.classes
        }

    chosen = of(_PREFERENCES[kind])
    if any(of(simpler) == chosen for simpler in _PREFERENCES[:kind]):
        return None
    return [chosen[class_id] for class_id in context.chain.depth]


Floor = Callable[[Candidate, tuple[int, ...] | None, tuple[Recompute, ...]], float]
"""A bound on the step of every plan of a candidate with these ZeRO stages and recompute choices; infinite: no fit."""


def hand_plans(
    candidates: Sequence[Candidate], uniform: Uniform, floor: Floor | None = None
) -> tuple[Alternative, ...]:
    """The best of each recipe, in the order of ``HAND_PLANS``; a recipe that no candidate suits is left out.

    ``floor`` spares the candidates of a recipe that cannot beat the best of it found before.
    """
    node = uniform.contexts.cluster.devices_per_node
    chosen = []
    for recipe in HAND_PLANS:
        suited = [c for c in candidates if recipe.considers(c, node)]
        floors = [0.0 if floor is None else floor(c, recipe.zeros, recipe.recomputes) for c in suited]
        best: Alternative | None = None
        for least_us, candidate in sorted(zip(floors, suited, strict=True), key=lambda pair: pair[0]):
            if best is not None and least_us >= (best.estimate.step_us if best.estimate.fits else inf):
                break
            for plan in uniform.plans(candidate, recipe.zeros, recipe.recomputes):
                best = plan if best is None else min(best, plan, key=rank)
        if best is not None:
            chosen.append(Alternative(plan=structs.replace(best.plan, name=recipe.name), estimate=best.estimate))
    return tuple(chosen)


def rank(alternative: Alternative) -> tuple[bool, float, str]:
    """Fitting plans first, by time; the others by memory. The text makes ties fall the same way always."""
    estimate = alternative.estimate
    measure = estimate.step_us if estimate.fits else float(estimate.peak_bytes)
    return (not estimate.fits, measure, str(alternative.plan.degrees))
