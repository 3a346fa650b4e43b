"""Bytes and FLOPs of what is measured are those that planning counts for the same call."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autoplan.capture.graph import TensorSpec
from autoplan.runtime import measure_bench, measure_matmul
from autoplan.runtime.measure_bench import Bench, Call
from autoplan.runtime.measure_matmul import SHAPES, measure_attention, measure_matmuls
from autoplan.runtime.measure_ops import OPS, Case, Tensors, case, cases, moved_bytes
from autoplan.search.pricing import NodeCount, count, op_name

CPU = torch.device("cpu")


def spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(map(sympy.Integer, tensor.shape)), hint=tuple(tensor.shape), dtype=tensor.dtype)


def counted(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> tuple[NodeCount, str]:
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"operand_{len(graph.nodes)}")
        node.meta["specs"] = (spec(value),)
        return node

    node = graph.call_function(call, map_aggregate(args, operand), map_aggregate(kwargs, operand))
    made = results if isinstance(results, tuple) else (results,)
    node.meta["specs"] = tuple(spec(tensor) for tensor in made if tensor is not None)
    return count(node), op_name(node)


def run(each: Case) -> Any:
    try:
        return each.call.function(*each.call.sets[0], **each.call.kwargs)
    except NotImplementedError:
        pytest.skip(f"no kernel of {each.op} on a CPU")


@pytest.mark.parametrize("place", range(len(OPS)), ids=lambda place: f"{OPS[place][0]}-{place}")
def test_every_op_runs_and_moves_the_bytes_that_planning_counts(place: int) -> None:
    each = case(*OPS[place], (Tensors(8, 128, torch.float32, CPU),))
    result = run(each)
    args = each.call.sets[0]
    price, name = counted(each.call.function, args, each.call.kwargs, result)
    assert name == each.op
    assert price.kind == "memory"
    assert moved_bytes(each.op, args, result) == sum(price.operand_bytes) + sum(price.result_bytes)


def test_cases_hold_every_op_or_each_name_once() -> None:
    assert len(list(cases((8, 64), torch.float32, CPU))) == len(OPS)
    once = [each.op for each in cases((2, 64), torch.float32, CPU, once=True)]
    assert len(once) == len(set(once)) == len({name.partition(".")[0] for name, _ in OPS})


class _Noted(Bench):
    """Times nothing; keeps what was called."""

    def __init__(self) -> None:
        super().__init__(CPU, lambda what, done=0, of=0: None, longest_s=1.0)

    def agree(self, *values: float) -> tuple[float, ...]:
        return values

    def time_us(self, call: Any) -> float:
        return 1.0


@pytest.mark.parametrize("flops", [1e5, 1e7])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__.strip("_"))
def test_products_have_about_the_flops_asked_for(shape: Any, flops: float) -> None:
    call, args = shape(lambda *sizes: torch.ones(sizes), flops)
    price, _ = counted(call, args, {}, call(*args))
    assert flops / 2 < price.flops < 2 * flops


def test_rows_of_products_and_attention_say_what_planning_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[NodeCount, str]] = []

    def noted(call: Call, times: int) -> Any:
        args = call.sets[0]
        if times == 1:  # the first look
            return lambda: None
        seen.append(counted(call.function, args, call.kwargs, call.function(*args, **call.kwargs)))
        return lambda: None

    monkeypatch.setattr(measure_bench, "repeated", noted)
    monkeypatch.setattr(measure_matmul, "repeated", noted)
    monkeypatch.setattr(measure_matmul, "CPU_LEVELS", (1e5,))
    bench = _Noted()
    measure_matmuls(bench, ("fp32", "bf16"), 1.0)
    measure_attention(bench, torch.float32, "fp32", 1.0)
    assert len(seen) == len(bench.rows) == 2 * len(SHAPES) + 24  # attention: lengths, sizes of head, masks, ways
    for (price, name), row in zip(seen, bench.rows, strict=True):
        assert (row["op"], row["kind"], row["precision"]) == (name, price.kind, price.precision)
        assert row["flops"] == price.flops
        assert row["bytes_moved"] == sum(price.operand_bytes) + sum(price.result_bytes)
