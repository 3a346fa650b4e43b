"""The best few plans of a search, replayed: the fastest of them in simulated time is the plan.

    document = refine(graph, document, cluster)

The search is exact under sums over layers; a replay knows what those sums leave out (waits, order, what is alive when).
So the search's pick is replayed, then runner-ups and hand plans by turns, until ``events`` are spent, and the fastest
that fits becomes the pick. The proof is the search's bound, held to the plan that was chosen; a note says
what the replay changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from msgspec import structs

from autoplan import units
from autoplan.capture.graph import Graph
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import LegalityError
from autoplan.plans import Alternative, Estimate, Plan, PlanDocument, Proof, Replayed
from autoplan.replay import replay
from autoplan.runtime.optimizer import OptimizerFactory
from autoplan.search.explain import describe, why
from autoplan.search.planner import SAME, Progress

__all__ = ["EVENTS", "affordable", "refine"]

EVENTS = 25_000  # about 5 s of one core: a dry run writes down about 5,000 events each second


def refine(
    graph: Graph,
    document: PlanDocument,
    cluster: Cluster,
    *,
    events: int = EVENTS,
    hand_plans: bool = True,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
    progress: Progress | None = None,
) -> PlanDocument:
    """``document`` with the best few of its plans replayed, and the best of those first. ``graph`` is unfolded.

    ``hand_plans``: whether one of them may become the plan; not where the caller made decisions that they don't know.
    Unchanged where even the pick's replay would take more than ``events``.
    """
    searched = [Alternative(plan=document.plan, estimate=document.estimate), *document.runners_up]
    hand = [a for a in document.hand_plans if a.estimate.fits] if hand_plans else []
    ranked = [searched[0], *_by_turns(searched[1:], sorted(hand, key=_standing))]
    different: dict[Plan, Alternative] = {}
    for alternative in ranked:
        for each in (alternative, *_with_rings(alternative)):
            different.setdefault(_unnamed(each.plan), each)
    afforded = _afforded(graph, list(different.values()), events)
    if not afforded:
        return document
    by_hand = {_unnamed(a.plan) for a in hand}
    seen: dict[Plan, Alternative] = {}
    refused: list[str] = []
    for index, alternative in enumerate(afforded):
        if progress is not None:
            progress("replaying the best plans", index, len(afforded))
        # A split backward is no slower: the plan as it is matters where that doesn't fit, or where a hand plan is it.
        for form in _forms(alternative):
            try:
                found = replay(graph, form.plan, cluster, optimizer=optimizer, clip_norm=clip_norm)
            except LegalityError as error:
                refused.append(f"{describe(form.plan)} could not be replayed and may not run: {error}")
                continue
            figures = Replayed(
                step_us=found.step_us, tensor_bytes=found.tensor_bytes, reserved_bytes=found.reserved_bytes
            )
            estimate = structs.replace(form.estimate, replayed=figures, fits=found.fits)
            seen[_unnamed(form.plan)] = structs.replace(form, estimate=estimate)
            if found.fits and _unnamed(alternative.plan) not in by_hand:
                break
    if not seen:
        return structs.replace(document, notes=(*document.notes, *refused))

    def replayed(alternative: Alternative, forms: Sequence[Alternative]) -> Alternative:
        """The best of its ``forms`` that was replayed, under its own name."""
        found = [seen[_unnamed(form.plan)] for form in forms if _unnamed(form.plan) in seen]
        best = min(found, key=_standing, default=alternative)
        return structs.replace(best, plan=structs.replace(best.plan, name=alternative.plan.name))

    searched = [replayed(a, _forms(a)) for a in searched]
    searched += [a for a in seen.values() if a.plan.fused_matmul and a not in searched]
    fitting = [a for a in seen.values() if a.estimate.fits]
    best = min(fitting, key=lambda a: a.estimate.predicted_us) if fitting else searched[0]
    others = sorted((a for a in searched if _unnamed(a.plan) != _unnamed(best.plan)), key=_standing)
    settled = structs.replace(
        document,
        plan=structs.replace(best.plan, name=document.plan.name),
        estimate=structs.replace(best.estimate, proof=_proof(document.estimate.proof, best.estimate)),
        hand_plans=tuple(replayed(a, [a]) for a in document.hand_plans),  # a plan by hand stays as it is
        runners_up=tuple(
            structs.replace(a, plan=structs.replace(a.plan, name=f"runner-up {n}")) for n, a in enumerate(others, 1)
        ),
    )
    reasons = why(document)
    other_notes = [note for note in document.notes if note not in reasons]
    return settled.with_notes((*why(settled), _said(searched[0], best, len(seen)), *other_notes, *refused))


def _proof(proof: Proof, estimate: Estimate) -> Proof:
    """What the search's bound says of the plan that was chosen, which need not be the one it was proved for."""
    gap = max(0.0, 1 - proof.bound_us / estimate.step_us)
    return proof if gap <= SAME else structs.replace(proof, status="gap", gap=gap)


def _with_rings(alternative: Alternative) -> Iterator[Alternative]:
    """The same plan with matmuls fused into rings, where that is the replay's to decide: sums over layers don't know
    them, so the search leaves them out."""
    plan = alternative.plan
    used = {layer.strategy for layer in plan.layers}
    gathers = any("S" in text for s in plan.strategies if s.key in used for text in (*s.boundary_in, *s.boundary_out))
    if plan.degrees.tensor > 1 and gathers and not plan.fused_matmul:
        yield structs.replace(alternative, plan=structs.replace(plan, fused_matmul=True))


def _forms(alternative: Alternative) -> list[Alternative]:
    """A pipeline also with a split backward, which sums over layers don't know either, and that first."""
    plan = alternative.plan
    if plan.degrees.pipe == 1 or plan.split_backward:
        return [alternative]
    return [structs.replace(alternative, plan=structs.replace(plan, split_backward=True)), alternative]


def _by_turns(first: Sequence[Alternative], second: Sequence[Alternative]) -> Iterator[Alternative]:
    for pair in zip_longest(first, second):
        yield from (alternative for alternative in pair if alternative is not None)


def _unnamed(plan: Plan) -> Plan:
    return structs.replace(plan, name="")


def _standing(alternative: Alternative) -> tuple[bool, bool, float]:
    """Those that fit first, of those the replayed, by time."""
    estimate = alternative.estimate
    return not estimate.fits, estimate.replayed is None, estimate.predicted_us


def _said(pick: Alternative, best: Alternative, count: int) -> str:
    replayed = best.estimate.replayed
    assert replayed is not None, "the best of those that were replayed"
    figures = (
        f"{units.time(replayed.step_us)} a step, {units.size(replayed.peak_bytes)} at the peak of the fullest device"
    )
    said = f"Replayed in simulated time it takes {figures}."
    if count > 1:
        said += f" {count} plans were replayed; this is the fastest of them that fits."
    if _unnamed(best.plan) == _unnamed(pick.plan):
        return said
    if pick.estimate.replayed is None:
        return f"{said} The search's own pick was not among them."
    slower = pick.estimate.predicted_us / best.estimate.predicted_us
    how = f"takes {slower:.2f} times as long there" if pick.estimate.fits else "does not fit there"
    return f"{said} The search's own pick, the best by its sums over layers, {how}."


def affordable(graph: Graph, plan: Plan, events: int = EVENTS) -> bool:
    """Whether the dry runs of all stages write down at most about ``events``. ``graph`` may be folded."""
    return _events(graph, plan) <= events


def _events(graph: Graph, plan: Plan) -> int:
    """Each stage runs its share of the graph for every micro-batch; a folded graph has some layers of many."""
    nodes = len(graph.fx.nodes) * len(graph.depth) // len(graph.layers)
    return nodes * (plan.micro_batches + 1)


def _afforded(graph: Graph, ranked: list[Alternative], events: int) -> list[Alternative]:
    """The first of ``ranked`` whose dry runs stay within ``events`` in all."""
    afforded = []
    for alternative in ranked:
        events -= _events(graph, alternative.plan)
        if events < 0:
            break
        afforded.append(alternative)
    return afforded
