"""The shard-and-recombine test: a choice is right if the pieces, computed apart, recombine to the whole.

Random operands are made at concrete sizes; the op is run on them whole; each operand is cut as the choice places it
(a Partial into random parts that add up); every rank's local call is run on its pieces; the results are put together
again by their placements and compared. Ranks run one after the other, or on threads where the local form
communicates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from autoplan.capture.graph import Sizes, TensorSpec
from autoplan.errors import RuleError
from autoplan.sharding.collectives import run_ranks
from autoplan.sharding.factors import evaluate
from autoplan.sharding.localize import local_call
from autoplan.sharding.placement import Placement
from autoplan.sharding.redistribution import cut, join
from autoplan.sharding.refinement import Refinement, linear_choice
from autoplan.sharding.registry import Call, operand_specs, tensor_operands
from autoplan.sharding.rule import Choice, Rule

TOLERANCE = 1e-10


def verify_choice(
    node: fx.Node,
    choice: Choice,
    sizes: Sizes,
    degree: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise RuleError if running ``node`` in pieces under ``choice`` does not give what it gives whole."""
    if node.target is operator.getitem:
        if choice.operands != choice.results:
            raise RuleError(f"choice {choice.name} of {node.name} moves data, but picking a result does not")
        return
    generator = torch.Generator().manual_seed(seed)
    whole = dict(zip(_operands(node), random_operands(node, sizes, dtype, generator), strict=True))
    expected = _results(run_on(node, whole, sizes, dtype))
    placed = dict(zip(tensor_operands(node), choice.operands, strict=True))
    pieces = {n: distribute(t, placed[n], degree, generator) for n, t in whole.items()}
    call = local_call(node, choice, sizes, degree)

    def rank_body(rank: int) -> list[Any]:
        local = {n: p[rank] for n, p in pieces.items()}
        extra = {"rank": rank, "degree": degree, "group_name": "verify"} if choice.lowering else {}
        return _results(_call(call.target, call.args, {**call.kwargs, **extra}, local, dtype))

    ranks = run_ranks(rank_body, degree) if choice.lowering else [rank_body(rank) for rank in range(degree)]
    for i, (want, placement) in enumerate(zip(expected, choice.results, strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        got = recombine([r[i] for r in ranks], placement)
        problem = _difference(got, want, tolerance)
        if problem:
            raise RuleError(
                f"choice {choice.name} of {node.name} ({node.target}) at {sizes}, degree {degree}, is refuted: "
                f"result {i} as {placement} {problem}; correct the op's rule"
            )


def distribute(
    whole: torch.Tensor, placement: Placement, degree: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """One piece for each rank; a Partial becomes random parts that add up to the whole."""
    if placement.kind == "R":
        return [whole] * degree
    if placement.kind == "S":
        return [cut(whole, placement, rank, degree) for rank in range(degree)]
    parts = [torch.randn(whole.shape, generator=generator, dtype=torch.float64) for _ in range(degree - 1)]
    parts = [part.to(whole.dtype) for part in parts]
    return [*parts, whole - torch.stack(parts).sum(0)]


def recombine(pieces: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor; raises RuleError where ranks that should agree do not."""
    if placement.kind == "S":
        return join(pieces, placement)
    if placement.kind == "P":
        return torch.stack(pieces).sum(0)
    for rank, piece in enumerate(pieces):
        if _difference(piece, pieces[0], 0.0):
            raise RuleError(f"a replicated result differs between rank 0 and rank {rank}; declare it Partial")
    return pieces[0]


def check_example(target: torch._ops.OpOverload | str, build: Callable[[Call], Rule], example: tuple[Any, ...]) -> None:
    """Test a rule that is about to be registered on example arguments, at degree 2 and 3."""
    op: Callable[..., Any]
    if isinstance(target, str):
        namespace, name, overload = target.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    else:
        op = target
    graph = fx.Graph()
    args = tuple(
        _example_placeholder(graph, f"a{i}", a) if isinstance(a, torch.Tensor) else a for i, a in enumerate(example)
    )
    node = graph.call_function(op, args)
    node.meta["specs"] = tuple(_spec(t) for t in _results(op(*example)) if isinstance(t, torch.Tensor))
    rule, sizes = build(Call(node)), Sizes(batch=1)
    refinement = Refinement((node,), rules=lambda _: rule)
    linear = [linear_choice(rule, members) for members in rule.linear]
    for degree in (2, 3):
        for choice in (*refinement.choices(node, sizes, degree), *linear):
            verify_choice(node, choice, sizes, degree)


# -- operands

_GROUPED = {"aten._grouped_mm.default": ("self", "mat2"), "autoplan.grouped_mm.default": ("a", "b")}


def _operands(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(tensor_operands(node)))


def random_operands(node: fx.Node, sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """One for each distinct operand, in order."""
    specs = dict(zip(tensor_operands(node), operand_specs(node), strict=True))
    limits = _index_limits(node, sizes)
    drawn = {n: _random(spec, sizes, dtype, limits.get(n, (0, 4)), generator) for n, spec in specs.items()}
    if "grouped_mm" in str(node.target):  # ends of runs ascend, the last is the end of the dim
        offs = Call(node).arg("offs")
        left, right = (Call(node).arg(name) for name in _GROUPED[str(node.target)])
        groups, whole = len(drawn[offs]), drawn[right].shape
        end = drawn[left].shape[0] if len(whole) == 3 else whole[0]
        drawn[offs] = torch.linspace(0, end, groups + 1)[1:].to(torch.int32)
    return list(drawn.values())


def _random(
    spec: TensorSpec, sizes: Sizes, dtype: torch.dtype, limits: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    shape = spec.at(sizes)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    drawn = torch.randint(*limits, shape, generator=generator)
    return drawn > 1 if spec.dtype == torch.bool else drawn.to(spec.dtype)


def _index_limits(node: fx.Node, sizes: Sizes) -> dict[fx.Node, tuple[int, int]]:
    """Ranges of the operands that are indices."""
    name = str(node.target)
    if not name.startswith("aten."):
        return {}
    call = Call(node)

    def size(argument: str, dim: int) -> int:
        return evaluate(call.shape(argument)[dim], sizes)

    if name == "aten.embedding.default":
        return {call.arg("indices"): (0, size("weight", 0))}
    if name == "aten.embedding_dense_backward.default":
        return {call.arg("indices"): (0, evaluate(call.expr(call.arg("num_weights")), sizes))}
    if name.startswith("aten.nll_loss"):
        return {call.arg("target"): (0, size("self", -1))}
    if name.startswith(("aten.gather", "aten.scatter")):
        return {call.arg("index"): (0, size("self", call.arg("dim")))}
    if name in ("aten.index.Tensor", "aten.index_put.default"):
        return {n: (0, size("self", i)) for i, n in enumerate(call.arg("indices")) if n is not None}
    return {}


# -- running


def run_on(node: fx.Node, values: Mapping[fx.Node, Any], sizes: Sizes, dtype: torch.dtype) -> Any:
    """What a node returns for the given operands; its other arguments stay those of the whole call."""

    def number(n: fx.Node) -> Any:
        return evaluate(n.meta["expr"], sizes) if "expr" in n.meta else n

    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), number)
    return _call(node.target, args, kwargs, values, dtype)


def _call(target: Callable[..., Any], args: Any, kwargs: Any, values: Mapping[fx.Node, Any], dtype: torch.dtype) -> Any:
    """On CPU, with every floating dtype argument replaced by the one that the test computes in."""

    def known(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    args = fx.node.map_aggregate(fx.node.map_arg(args, lambda n: values[n]), known)
    kwargs = fx.node.map_aggregate(fx.node.map_arg(kwargs, lambda n: values[n]), known)
    if str(target) in ("aten._log_softmax.default", "aten._softmax.default"):
        args = (*args[:2], False)  # half_to_float is for half operands
    result = target(*args, **kwargs)
    return result.zero_() if "empty" in str(target) else result  # what an uninitialised tensor holds does not matter


def _results(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype}, not {want.dtype}"
    if not got.dtype.is_floating_point:
        return "" if torch.equal(got, want) else "differs"
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"is off by {float((got - want).abs().nan_to_num(0).max()):.3g}"


def _example_placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["specs"] = (_spec(value),)
    return node


def _spec(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(map(sympy.Integer, value.shape)), hint=tuple(value.shape), dtype=value.dtype)
