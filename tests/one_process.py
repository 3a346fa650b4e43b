"""One process as the measure: what plain training of a model does, and how far the ranks of a plan are from it.

``train`` records it once, before the ranks are forked (``run_ranks(prepare=…)``); ``differences`` compares one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autoplan.capture import Graph
from autoplan.capture.graph import TensorSpec
from autoplan.capture.trace import Promote
from autoplan.runtime.optimizer import OptimizerFactory
from autoplan.runtime.step import TrainStep

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one process did: a loss and a norm for each batch, the gradients of the first, the parameters at the end."""

    batches: tuple[Batch, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]  # before clipping
    first_gradients: Mapping[str, Tensor]  # as the optimizer saw them: clipped
    parameters: Mapping[str, Tensor]


def train(
    model: nn.Module, batches: Sequence[Batch], *, optimizer: OptimizerFactory, clip_norm: float, promote: bool = True
) -> Training:
    """Train ``model`` (which returns its loss) as anybody would. ``promote``: with the model's own casts to float32
    made casts to float64, as in a graph captured so."""
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    losses: list[float] = []
    norms: list[float] = []
    first: dict[str, Tensor] = {}
    for batch in batches:
        made.zero_grad()
        with Promote() if promote else nullcontext():
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
        first = first or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        made.step()
        losses.append(float(loss.detach()))
    return Training(
        batches=tuple(batches),
        losses=tuple(losses),
        norms=tuple(norms),
        first_gradients=first,
        parameters={n: p.detach().clone() for n, p in model.named_parameters()},
    )


def differences(step: TrainStep, one: Training) -> dict[str, float]:
    """Train by ``step`` and return the largest relative difference of any rank, by what differs. A collective.

    Every gradient and every parameter of ``one`` must turn up on some rank; infinite where something is not a number.
    """
    gradients: dict[str, Tensor] = {}
    hook = step.optimizer.register_step_pre_hook(lambda *_: gradients.update(whole_gradients(step)))
    losses: list[float] = []
    norms: list[float] = []
    for batch in one.batches:
        losses.append(float(step(batch)))
        assert step.last_grad_norm is not None
        norms.append(step.last_grad_norm)
        hook.remove()  # of the first step only
    parameters = {n: t for n, t in step.store.full_state_dict().items() if n in one.parameters}
    require_all(gradients, one.first_gradients, "gradients")
    require_all(parameters, one.parameters, "parameters")
    found = {
        "loss": [relative(scalar(a), scalar(b)) for a, b in zip(losses, one.losses, strict=True)],
        "norm": [relative(scalar(a), scalar(b)) for a, b in zip(norms, one.norms, strict=True)],
        "gradient": [relative(gradients[name], one.first_gradients[name]) for name in gradients],
        "parameter": [relative(parameters[name], one.parameters[name]) for name in parameters],
    }
    worst = torch.tensor([max(values, default=0.0) for values in found.values()], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(found, worst.tolist(), strict=True))


def whole_gradients(step: TrainStep) -> dict[str, Tensor]:
    """This stage's gradients as the optimizer sees them (clipped), whole, by name. A collective of the stage."""
    return {
        held.spec.name: step.store.full_tensor(held, master.grad.detach()).clone()
        for held, master in step.store.trainable
        if master.grad is not None
    }


def require_all(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    """Assert that the ranks together have every name, and no rank any other. A collective."""
    names, held = sorted(wanted), set(found)
    assert held <= set(names), f"{what} that one process does not have: {sorted(held - set(names))}"
    seen = torch.tensor([name in held for name in names], dtype=torch.int)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    missing = [name for name, count in zip(names, seen.tolist(), strict=True) if not count]
    assert not missing, f"{what} that no rank has: {missing}"


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element expected; infinite where anything is not a number."""
    scale = float(expected.abs().max())
    difference = float((actual - expected).abs().max()) / (scale if scale > 0 else 1.0)
    return difference if difference == difference else torch.inf


def in_float64(graph: Graph) -> Graph:
    """A graph that was captured in float32, made to compute in float64: the same nodes, classes and fingerprint.

    So a plan that was searched for float32 runs as it is, every decision, and can be held to 1e-9. Changes ``graph``.
    """

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def wide_spec(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=wide(spec.dtype))

    for node in graph.fx.nodes:
        node.args = fx.node.map_aggregate(node.args, wide)
        node.kwargs = fx.node.map_aggregate(node.kwargs, wide)
        if "specs" in node.meta:
            node.meta["specs"] = tuple(map(wide_spec, node.meta["specs"]))
    return replace(
        graph,
        params=tuple(replace(p, dtype=wide(p.dtype)) for p in graph.params),
        unfolded_params=tuple(replace(p, dtype=wide(p.dtype)) for p in graph.unfolded_params),
        buffers=tuple(replace(b, dtype=wide(b.dtype)) for b in graph.buffers),
        inputs=tuple(replace(i, spec=wide_spec(i.spec)) for i in graph.inputs),
    )
