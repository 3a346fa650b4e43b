"""What a results file says: the figures of each shape, from its runs.

Errors and orders are of plans that ran to their end; peers have no prediction. Plans are ordered within a model only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.compare.results import Model, Prediction, Results, Run, Shape
from benchmarks.compare.statistics import Agreement, Errors, Order, agreement, errors, order, regret

__all__ = ["MemoryFigures", "ModelFigures", "PeerFigures", "ShapeFigures", "agreement_of", "figures_of"]

MARGIN = 0.1  # two runs are asked for the order of plans that differ by more than this


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFigures:
    """A peer at its best setting."""

    name: str
    best: Run | None  # None: no setting ran
    ratio: float | None  # the pick's time ÷ the peer's: below 1, the pick is faster
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One model on one shape."""

    model: Model
    plans: tuple[Run, ...]  # that ran, fastest first
    failed: tuple[Run, ...]
    pick: Run | None  # None: it did not run
    regret: float | None  # the pick's time ÷ the best plan's
    tau: float | None
    peers: tuple[PeerFigures, ...]

    @property
    def best(self) -> Run | None:
        return self.plans[0] if self.plans else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Of plans that ran: the fullest rank's predicted against measured bytes. And of those that did not."""

    charged: Errors | None  # what the kernel charged, the process included, against replay's peak
    tensors: Errors | None  # torch's tensors alone
    sums: Errors | None  # the search's sums against torch's tensors
    killed: tuple[Run, ...]  # though predicted to fit
    overhead_bytes: float | None  # median of what was charged beyond tensors; calibration's ``reserved_bytes``


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeFigures:
    """One shape, its models together."""

    shape: Shape
    models: tuple[ModelFigures, ...]
    replay: Errors | None
    adjusted: Errors | None  # of replay, with the machine's drift since calibration taken out
    sums: Errors | None
    order: Order
    order_apart: Order  # measurements within ``noise`` tied
    order_sums: Order
    noise: float  # median spread of steady steps
    memory: MemoryFigures

    @property
    def plans(self) -> tuple[Run, ...]:
        return tuple(run for model in self.models for run in model.plans)

    @property
    def worst_regret(self) -> float | None:
        found = [model.regret for model in self.models if model.regret is not None]
        return max(found) if found else None


def figures_of(shape: Shape) -> ShapeFigures:
    models = tuple(_model(shape, model) for model in shape.models)
    plans = [run for model in models for run in model.plans]
    noise = median([run.spread for run in plans]) if plans else 0.0
    return ShapeFigures(
        shape=shape,
        models=models,
        replay=errors(_times(plans, _replay_us)),
        adjusted=errors((run.adjusted_us, run.step_us) for run in plans if run.adjusted_us is not None),
        sums=errors(_times(plans, _sums_us)),
        order=_pooled(models, _replay_us, 0.0),
        order_apart=_pooled(models, _replay_us, noise),
        order_sums=_pooled(models, _sums_us, 0.0),
        noise=noise,
        memory=_memory(shape, plans),
    )


def _model(shape: Shape, model: Model) -> ModelFigures:
    runs = shape.of(model.name, peers=False)
    plans = sorted((run for run in runs if run.ok), key=lambda run: run.step_us)
    pick = next((run for run in plans if run.kind == "pick"), None)
    return ModelFigures(
        model=model,
        plans=tuple(plans),
        failed=tuple(run for run in runs if not run.ok),
        pick=pick,
        regret=regret(pick.step_us, [run.step_us for run in plans]) if pick else None,
        tau=order(_times(plans, _replay_us)).tau,
        peers=tuple(_peers(shape.of(model.name, peers=True), pick)),
    )


def _peers(runs: Sequence[Run], pick: Run | None) -> Iterable[PeerFigures]:
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        best = min((run for run in own if run.ok), key=lambda run: run.step_us, default=None)
        ratio = pick.step_us / best.step_us if best and pick else None
        why_not = "; ".join(dict.fromkeys(f"{run.what}: {run.said}" if run.what else run.said for run in own))
        yield PeerFigures(name=name, best=best, ratio=ratio, why_not="" if best else why_not)


def _replay_us(prediction: Prediction) -> float:
    return prediction.step_us


def _sums_us(prediction: Prediction) -> float:
    return prediction.sums_us


def _times(runs: Iterable[Run], predicted: Callable[[Prediction], float]) -> list[tuple[float, float]]:
    return [(predicted(run.prediction), run.step_us) for run in runs if run.prediction is not None]


def _pooled(models: Iterable[ModelFigures], predicted: Callable[[Prediction], float], noise: float) -> Order:
    total = Order()
    for model in models:
        total += order(_times(model.plans, predicted), noise=noise)
    return total


def _memory(shape: Shape, plans: Sequence[Run]) -> MemoryFigures:
    charged, tensors, sums, overheads = [], [], [], []
    for run in plans:
        prediction = run.prediction
        if prediction is None:
            continue
        peaks = [rank.peak_bytes for rank in run.ranks if rank.peak_bytes is not None]
        held = [rank.tensor_bytes for rank in run.ranks if rank.tensor_bytes is not None]
        if peaks:
            charged.append((float(max(prediction.tensor_bytes) + prediction.reserved_bytes), float(max(peaks))))
        if held:
            tensors.append((float(max(prediction.tensor_bytes)), float(max(held))))
            sums.append((float(max(prediction.sums_bytes)), float(max(held))))
        overheads += [
            float(rank.peak_bytes - rank.tensor_bytes)
            for rank in run.ranks
            if rank.peak_bytes is not None and rank.tensor_bytes is not None
        ]
    return MemoryFigures(
        charged=errors(charged),
        tensors=errors(tensors),
        sums=errors(sums),
        killed=tuple(r for r in shape.runs if r.outcome == "out of memory" and r.prediction and r.prediction.fits),
        overhead_bytes=median(overheads) if overheads else None,
    )


def agreement_of(first: Results, second: Results) -> Agreement:
    """How alike two runs order the plans and peers that both measured, within each shape and model."""
    total = Agreement(plans=0, pairs=0, alike=0, mean_absolute=0.0)
    others = {shape.name: shape for shape in second.shapes}
    for shape in first.shapes:
        for model in shape.models if shape.name in others else ():
            mine, theirs = (_measured(each, model.name) for each in (shape, others[shape.name]))
            total += agreement(mine, theirs, margin=MARGIN)
    return total


def _measured(shape: Shape, model: str) -> dict[str, float]:
    return {_identity(run): run.step_us for run in shape.of(model) if run.ok}


def _identity(run: Run) -> str:
    """A plan is its decisions, whatever name it was run under; a peer's setting is named within the peer."""
    return f"{run.name}: {run.what}" if run.kind == "peer" else run.what
