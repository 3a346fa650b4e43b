"""Why a plan, or why none: sentences whose every claim was priced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan import units
from autoplan.errors import UserError
from autoplan.plans import Alternative, Estimate, Plan, PlanDocument, StageMemory
from autoplan.search.hand_plans import Uniform, rank
from autoplan.search.space import Candidate, Pins, Space

if TYPE_CHECKING:
    from autoplan.search.planner import Problem

KINDS = ("params", "grads", "optimizer", "activations", "transient", "buffers")
_WORDS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "transient": "one layer's working set",
    "buffers": "communication buffers",
}
# Clusters that are tried when nothing fits, as multiples of the nodes there are.
MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def why(document: PlanDocument) -> list[str]:
    """What bounds the step, how the plan compares with those made by hand, and how sure it is."""
    return [_bounded(document.estimate), *_compared(document), _proved(document.estimate)]


def _bounded(estimate: Estimate) -> str:
    parts = {
        "compute": estimate.compute_us,
        "tensor-parallel communication": estimate.exposed_tensor_us,
        "data-parallel communication": estimate.exposed_data_us,
        "pipeline sends": estimate.pipeline_send_us,
        "the pipeline bubble": estimate.bubble_us,
        "the optimizer": estimate.optimizer_us,
    }
    shares = [(name, us / estimate.step_us) for name, us in sorted(parts.items(), key=lambda item: -item[1])]
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    stage, memory = _fullest(estimate)
    kind, kind_bytes = _largest(memory)
    step = "A step" if estimate.replayed is None else "By sums over layers a step"
    return (
        f"{step} of {units.time(estimate.step_us)} is {said}. The fullest device, on stage {stage}, holds "
        f"{units.size(memory.total_bytes)} of {units.size(estimate.device_memory_bytes)}, {units.size(kind_bytes)} of "
        f"it {kind}."
    )


def _compared(document: PlanDocument) -> Iterator[str]:
    fits = [hand for hand in document.hand_plans if hand.estimate.fits]
    if fits:
        best = min(fits, key=lambda hand: hand.estimate.slowdown(document.estimate))
        gain = best.estimate.slowdown(document.estimate) - 1
        verb = "as fast as" if abs(gain) < 1e-5 else f"{'faster' if gain > 0 else 'slower'} by {abs(gain):.1%} than"
        step = units.time(best.estimate.predicted_us)
        yield f"It is {verb} the best plan made by hand, {describe(best.plan)} ({step})."
    elif document.hand_plans:
        yield "No plan made by hand fits."
    others = [h for h in fits if h is not best]
    if others:
        slower = ", ".join(f"{h.plan.name} {h.estimate.slowdown(document.estimate) - 1:+.0%}" for h in others)
        yield f"The others, beside it: {slower}."
    for hand in document.hand_plans:
        if not hand.estimate.fits:
            yield f"{describe(hand.plan)} does not fit: {_short(hand.estimate)}."


def _proved(estimate: Estimate) -> str:
    proof = estimate.proof
    if proof.status == "optimal":
        return f"Proved: no plan in the space is faster ({proof.space})."
    if proof.status == "gap":
        return f"By these sums no plan in the space is faster by more than {proof.gap:.2%} ({proof.space})."
    return "The plan was priced, not searched for."


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    zeros = sorted({layer.zero for layer in plan.layers})
    recomputed = sum(layer.recompute == "full" for layer in plan.layers)
    words = [
        str(plan.degrees),
        f"{plan.micro_batches} micro-batches of {plan.micro_batch}",
        f"ZeRO {'/'.join(map(str, zeros))}",
    ]
    if recomputed:
        words.append("all recomputed" if recomputed == len(plan.layers) else f"{recomputed} layers recomputed")
    return f"{plan.name} ({', '.join(words)})"


def explain_infeasible(problem: Problem, pins: Pins, uniform: Uniform, space: Space) -> str:
    """What is short, where and by how much in the plan nearest to fitting, and the ways out that were found to fit."""
    plans = [plan for candidate in _leanest(space) for plan in uniform.plans(candidate)]
    nearest = min(plans, key=lambda plan: (plan.estimate.peak_bytes, rank(plan)))
    text = f"nothing fits. The plan nearest to fitting, {describe(nearest.plan)}, is short: {_short(nearest.estimate)}."
    ways = sorted(_unpinned(problem, pins), key=lambda way: way[1].estimate.step_us)
    found = [f"{words} (then {describe(plan.plan)} fits, {units.time(plan.estimate.step_us)})" for words, plan in ways]
    larger = _more_devices(problem, pins)
    if larger is not None:
        found.append(larger)
    if not found:
        return f"{text} Not even {MULTIPLES[-1]} times the nodes would do: use a smaller model or a shorter sequence."
    return f"{text} Cheapest way out: {found[0]}." + "".join(f" Or {other}." for other in found[1:])


def _unpinned(problem: Problem, pins: Pins) -> Iterator[tuple[str, Alternative]]:
    """The fastest uniform plan that fits when one pin is let go, for each pin."""
    words = {
        "recompute": "let layers be recomputed",
        "micro_batch": "use a smaller micro-batch",
        "zero": "use a higher ZeRO stage",
        "pipe": "choose another pipeline degree",
        "data": "choose another data degree",
        "tensor": "choose another tensor degree",
        "schedule": "choose another schedule",
    }
    for name, said in words.items():
        if getattr(pins, name) is None:
            continue
        try:
            freed = replace(pins, **{name: None})
            space, uniform = problem.space(freed), Uniform(problem.contexts(freed))
        except UserError:
            continue
        fits = [p for c in _leanest(space) for p in uniform.plans(c) if p.estimate.fits]
        if fits:
            best = min(fits, key=rank)
            if name == "zero":
                said = f"use ZeRO {max(layer.zero for layer in best.plan.layers)}"
            elif name == "micro_batch":
                said = f"use a micro-batch of {best.plan.micro_batch}"
            yield said, best


def _more_devices(problem: Problem, pins: Pins) -> str | None:
    """The smallest multiple of the nodes on which a uniform plan fits, with data and pipe degrees left free."""
    freed = replace(pins, data=None, pipe=None)
    for multiple in MULTIPLES:
        cluster = replace(problem.cluster, nodes=problem.cluster.nodes * multiple)
        try:
            space = problem.space(freed, cluster)
        except UserError:  # the batch, or a pinned degree, does not divide so many devices
            continue
        uniform = Uniform(problem.contexts(freed, cluster))
        lean = [c for c in _leanest(space) if c.degrees.tensor <= cluster.devices_per_node]
        for candidate in lean:
            for plan in uniform.plans(candidate, zeros=(3,), recomputes=("full",)):
                if plan.estimate.fits:
                    return (
                        f"{multiple} times the nodes, {cluster.size} devices: {describe(plan.plan)} fits there, "
                        f"{units.time(plan.estimate.step_us)}"
                    )
    return None


def _leanest(space: Space) -> list[Candidate]:
    """For each mesh the candidate with the smallest micro-batch: the one that holds least."""
    least: dict[str, Candidate] = {}
    for candidate in space.candidates:
        key = str(candidate.degrees)
        if key not in least or candidate.micro_batch < least[key].micro_batch:
            least[key] = candidate
    return list(least.values())


def _short(estimate: Estimate) -> str:
    if estimate.replayed is not None:
        need, have = units.size(estimate.predicted_peak_bytes), units.size(estimate.device_memory_bytes)
        return f"the fullest device needs {need} in its replay and has {have}"
    stage, memory = _fullest(estimate)
    sizes = sorted(((getattr(memory, f"{kind}_bytes"), _WORDS[kind]) for kind in KINDS), reverse=True)
    parts = ", ".join(f"{units.size(size)} {word}" for size, word in sizes[:3] if size)
    where = f"stage {stage}" if len(estimate.memory) > 1 else "every device"
    need, have = units.size(memory.total_bytes), units.size(estimate.device_memory_bytes)
    return f"{where} needs {need} and has {have} ({parts})"


def _fullest(estimate: Estimate) -> tuple[int, StageMemory]:
    return max(enumerate(estimate.memory), key=lambda pair: pair[1].total_bytes)


def _largest(memory: StageMemory) -> tuple[str, int]:
    kind = max(KINDS, key=lambda name: getattr(memory, f"{name}_bytes"))
    return _WORDS[kind], int(getattr(memory, f"{kind}_bytes"))
