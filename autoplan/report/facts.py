"""What there is to say about a plan, derived once from its document; no layout here.

breakdown    parts of the step that add up to it
stages       layers of each pipeline stage, gathered into runs that are treated alike, and its memory by kind
rivals       hand plans and runners-up beside the plan: slower by how much, or why they cannot be had
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan import units
from autoplan.plans import Alternative, Estimate, Plan, PlanDocument, StageMemory

ORIGIN_NOTE = "autoplan run: "  # a note for the command line, not for readers (see autoplan/cli/origin.py)

CLOSE = 8  # runners-up that are shown; a plan file has more

# (field of Estimate, what it is called, what it means)
PARTS = (
    ("compute_us", "compute", "matrix products and the rest, on the busiest stage"),
    ("exposed_tensor_us", "tensor-parallel communication", "not hidden behind compute"),
    ("exposed_data_us", "data-parallel communication", "gradients and sharded parameters, not hidden behind compute"),
    ("pipeline_send_us", "pipeline sends", "activations and their gradients between stages"),
    ("bubble_us", "pipeline bubble", "stages waiting for each other"),
    ("optimizer_us", "optimizer", "the update of the parameters"),
)

# (field of StageMemory, what it is called)
KINDS = (
    ("params_bytes", "parameters"),
    ("grads_bytes", "gradients"),
    ("optimizer_bytes", "optimizer state"),
    ("activations_bytes", "activations"),
    ("transient_bytes", "working set"),
    ("buffers_bytes", "communication buffers"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    key: str
    label: str
    meaning: str
    us: float
    share: float  # of the step, 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring layers that are treated alike."""

    first: int
    count: int
    treatment: str  # "tensor+sequence, ZeRO 1, recompute"

    @property
    def layers(self) -> str:
        return f"{self.first}" if self.count == 1 else f"{self.first}–{self.first + self.count - 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    key: str
    label: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    index: int
    runs: tuple[Run, ...]
    memory: tuple[Kind, ...]
    total_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes

    @property
    def layer_count(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A plan beside the one that was chosen (which is a rival of itself, at 1.00)."""

    name: str
    what: str
    step_us: float
    sums_us: float  # what ``parts`` add up to
    slowdown: float  # its step over the chosen plan's
    peak_bytes: int
    fits: bool
    verdict: str
    parts: tuple[Part, ...]
    chosen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    model: str
    cluster: str
    mesh: str
    task: str  # "batch 512 × sequence 8,192, bf16"
    fits: bool
    step_us: float
    replayed: bool  # step_us and peak_bytes are a replay's; breakdown and stages are sums over layers all the same
    sums_us: float
    tokens_per_s: float
    peak_bytes: int
    limit_bytes: int
    headline: str
    decisions: tuple[tuple[str, str], ...]
    breakdown: tuple[Part, ...]
    bound_by: str
    stages: tuple[Stage, ...]
    treatments: tuple[str, ...]  # distinct, in order of first use
    chosen: Rival
    hand_plans: tuple[Rival, ...]
    runners_up: tuple[Rival, ...]
    why: tuple[str, ...]
    proof: str
    proof_short: str
    notes: tuple[str, ...]

    @property
    def sums_hint(self) -> str:
        """What to say where figures are sums while the headline is a replay; "" where both are sums."""
        if not self.replayed:
            return ""
        return (
            f"By the sums over layers that the search ranks with, {units.time(self.sums_us)} a step; replayed in "
            f"simulated time it is {units.time(self.step_us)}."
        )


def facts_of(document: PlanDocument) -> Facts:
    plan, estimate = document.plan, document.estimate
    mark, step_us = plan.fingerprint, estimate.predicted_us
    hand_plans = tuple(rival(a, estimate, f"hand plan {i + 1}") for i, a in enumerate(document.hand_plans))
    runners_up = tuple(
        rival(a, estimate, f"runner-up {i + 1}", plan) for i, a in enumerate(document.runners_up[:CLOSE])
    )
    reasons, notes = why(document)
    return Facts(
        model=units.printable(mark.model_name) or "the model",
        cluster=units.printable(mark.cluster_name) or "the cluster",
        mesh=str(plan.degrees),
        task=f"global batch {mark.global_batch:,} × sequence {mark.seq:,}, {plan.precision}",
        fits=estimate.fits,
        step_us=step_us,
        replayed=estimate.replayed is not None,
        sums_us=estimate.step_us,
        tokens_per_s=mark.global_batch * mark.seq / step_us * 1e6 if step_us else 0.0,
        peak_bytes=estimate.predicted_peak_bytes,
        limit_bytes=estimate.device_memory_bytes,
        headline=headline(plan, estimate, hand_plans),
        decisions=decisions(plan),
        breakdown=breakdown(estimate),
        bound_by=estimate.bound_by or max(breakdown(estimate), key=lambda part: part.us).label,
        stages=tuple(stage(plan, estimate, index) for index in range(len(plan.cuts))),
        treatments=tuple(dict.fromkeys(treatment(plan, layer) for layer in range(len(plan.layers)))),
        chosen=rival(Alternative(plan=plan, estimate=estimate), estimate, plan.name or "this plan", chosen=True),
        hand_plans=hand_plans,
        runners_up=runners_up,
        why=reasons,
        proof=proof(estimate),
        proof_short=proof_short(estimate),
        notes=notes,
    )


def breakdown(estimate: Estimate) -> tuple[Part, ...]:
    whole = estimate.step_us or 1.0
    return tuple(
        Part(key=key.removesuffix("_us"), label=label, meaning=meaning, us=us, share=us / whole)
        for key, label, meaning in PARTS
        for us in (getattr(estimate, key),)
    )


def kinds(memory: StageMemory) -> tuple[Kind, ...]:
    return tuple(
        Kind(key=key.removesuffix("_bytes"), label=label, n_bytes=getattr(memory, key)) for key, label in KINDS
    )


def treatment(plan: Plan, layer: int) -> str:
    """How one layer is treated, in words."""
    decided = plan.layers[layer]
    words = [units.printable(plan.strategy(layer).kind) if plan.degrees.tensor > 1 else "whole"]
    if plan.degrees.data > 1:
        words.append(f"ZeRO {decided.zero}" if decided.zero else "no ZeRO")
    if decided.recompute != "none":
        words.append("recompute")
    return ", ".join(words)


def runs(plan: Plan, layers: Sequence[int]) -> tuple[Run, ...]:
    gathered = []
    for words, group in itertools.groupby(layers, key=lambda layer: treatment(plan, layer)):
        members = list(group)
        gathered.append(Run(first=members[0], count=len(members), treatment=words))
    return tuple(gathered)


def stage(plan: Plan, estimate: Estimate, index: int) -> Stage:
    memory = estimate.memory[index]
    return Stage(
        index=index,
        runs=runs(plan, plan.stage_layers(index)),
        memory=kinds(memory),
        total_bytes=memory.total_bytes,
        limit_bytes=estimate.device_memory_bytes,
    )


def decisions(plan: Plan) -> tuple[tuple[str, str], ...]:
    degrees = plan.degrees
    zeros = sorted({layer.zero for layer in plan.layers})
    recomputed = sum(layer.recompute != "none" for layer in plan.layers)
    rows = [
        ("Mesh", f"pipe {degrees.pipe} × data {degrees.data} × tensor {degrees.tensor}"),
        ("Micro-batches", f"{plan.micro_batches:,} of {units.count(plan.micro_batch, 'row')} on each data rank"),
        ("Schedule", plan.schedule if degrees.pipe > 1 else "no pipeline"),
        ("ZeRO", units.listed([str(zero) for zero in zeros]) if degrees.data > 1 else "no data axis"),
        ("Recompute", f"{recomputed} of {units.count(len(plan.layers), 'layer')}" if recomputed else "none"),
        ("Precision", plan.precision),
    ]
    if plan.split_backward:
        rows.append(("Backward", "gradients of activations are sent before those of parameters are computed"))
    if plan.fused_matmul:
        rows.append(("Matrix products", "fused with the tensor axis's collectives"))
    return tuple(rows)


def summary(plan: Plan) -> str:
    """A plan in one line, for tables."""
    words = [str(plan.degrees), f"micro-batch {plan.micro_batch} × {plan.micro_batches}"]
    if plan.degrees.pipe > 1:
        words.append(plan.schedule)
    if plan.degrees.data > 1:
        words.append("ZeRO " + "/".join(str(z) for z in sorted({layer.zero for layer in plan.layers})))
    recomputed = sum(layer.recompute != "none" for layer in plan.layers)
    if recomputed:
        words.append("recompute" if recomputed == len(plan.layers) else f"recompute {recomputed}/{len(plan.layers)}")
    return ", ".join(words)


def overflow(estimate: Estimate) -> str:
    """What does not fit: the fullest stage, by how much, and what fills it most."""
    if estimate.replayed is not None:
        return (
            f"a replay needs {units.size(estimate.predicted_peak_bytes)} of {units.size(estimate.device_memory_bytes)}"
        )
    worst = max(range(len(estimate.memory)), key=lambda s: estimate.memory[s].total_bytes)
    memory = estimate.memory[worst]
    most = max(kinds(memory), key=lambda kind: kind.n_bytes)
    where = f"stage {worst} needs" if len(estimate.memory) > 1 else "needs"
    return (
        f"{where} {units.size(memory.total_bytes)} of {units.size(estimate.device_memory_bytes)}, "
        f"mostly {most.label} ({units.size(most.n_bytes)})"
    )


def differences(plan: Plan, other: Plan) -> str:
    """What ``other`` decides otherwise."""
    found = []
    for name in ("pipe", "data", "tensor"):
        if getattr(plan.degrees, name) != getattr(other.degrees, name):
            found.append(f"{name} {getattr(other.degrees, name)}")
    for name in ("micro_batch", "schedule", "precision"):
        if getattr(plan, name) != getattr(other, name):
            found.append(f"{name.replace('_', '-')} {getattr(other, name)}")
    if not found and plan.cuts != other.cuts:
        found.append("cut at layers " + ", ".join(str(c) for c in other.cuts[1:]))
    if len(plan.layers) == len(other.layers):
        changed = [i for i in range(len(plan.layers)) if treatment(plan, i) != treatment(other, i)]
        if changed:
            ways = dict.fromkeys(treatment(other, i) for i in changed)
            found.append(f"{units.count(len(changed), 'layer')} as {' or '.join(ways)}")
    return "; ".join(found) or "the same decisions"


def rival(
    alternative: Alternative, against: Estimate, name: str, plan: Plan | None = None, *, chosen: bool = False
) -> Rival:
    """``plan``: describe it by what it decides otherwise than that plan."""
    estimate = alternative.estimate
    slowdown = estimate.slowdown(against)
    if not estimate.fits:
        verdict = "does not fit: " + overflow(estimate)
    elif chosen:
        verdict = "chosen"
    elif abs(slowdown - 1) < 0.0005:
        verdict = "as fast"
    else:
        verdict = f"{units.share(abs(slowdown - 1), 1)} {'slower' if slowdown > 1 else 'faster'}"
        if against.replayed is not None and estimate.replayed is None:
            verdict += ", sums against sums"
    named = alternative.plan.name if plan is None or alternative.plan.name != plan.name else ""
    return Rival(
        name=units.printable(named) or name,
        what=summary(alternative.plan) if plan is None else differences(plan, alternative.plan),
        step_us=estimate.predicted_us,
        sums_us=estimate.step_us,
        slowdown=slowdown,
        peak_bytes=estimate.predicted_peak_bytes,
        fits=estimate.fits,
        verdict=verdict,
        parts=breakdown(estimate),
        chosen=chosen,
    )


def headline(plan: Plan, estimate: Estimate, hand_plans: Sequence[Rival]) -> str:
    if not estimate.fits:
        return f"This plan does not fit: {overflow(estimate)}."
    text = (
        f"{units.time(estimate.predicted_us)} a step on {plan.degrees}, {units.size(estimate.predicted_peak_bytes)} of "
        f"{units.size(estimate.device_memory_bytes)} used at the peak"
    )
    feasible = [hand for hand in hand_plans if hand.fits]
    if feasible:
        best = min(feasible, key=lambda hand: hand.slowdown)
        text += f"; the best plan made by hand ({best.name}) takes {units.ratio(best.slowdown)} as long"
    elif hand_plans:
        text += "; none of the plans made by hand fits"
    return text + "."


def why(document: PlanDocument) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(reasons, other notes): the search leaves its reasons among the notes; worked out again, they are told apart."""
    # Late: it brings torch, which showing a plan would not need otherwise.
    from autoplan.search.explain import why as reasons

    said = tuple(reasons(document))
    others = (note for note in document.notes if not note.startswith(ORIGIN_NOTE) and note not in said)
    proved = 1  # the last says what was proved, and has a section of its own
    return tuple(map(units.printable, said[:-proved])), tuple(map(units.printable, others))


def proof_short(estimate: Estimate) -> str:
    if estimate.proof.status == "optimal":
        return "optimal"
    return f"within {100 * estimate.proof.gap:.1f}%" if estimate.proof.status == "gap" else "priced"


def proof(estimate: Estimate) -> str:
    """What was proved, over which space, by which solver."""
    given = estimate.proof
    if given.status == "priced":
        return "This plan was given, not searched for; it is priced and nothing is proved about it."
    space = f" over {units.printable(given.space)}" if given.space else " over the space that was searched"
    solver = f" Solver: {units.printable(given.solver)}." if given.solver else ""
    if given.status == "optimal":
        return f"Proved optimal under the cost model{space}.{solver}"
    return (
        f"No plan is faster than {units.time(given.bound_us)} under the cost model{space}; this one is within "
        f"{100 * given.gap:.1f}% of that.{solver}"
    )
