"""The ops that training graphs are made of, each called as a graph calls it: what it moves, and how long it takes.

``OPS`` names an overload and how its arguments are made from a set of tensors of one size (``Tensors``). An op may
stand there more than once, with the operands it usually has: a whole tensor, a row that is broadcast, a number.
Bytes are counted as ``autoplan.search.pricing.count`` counts them (tests/runtime/test_measure_ops.py compares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autoplan.runtime.measure_bench import Bench, Call, bytes_of, cold_sets, in_turn, repeated, tensors_of

aten = torch.ops.aten

# Rows and width of an activation. The first is too small to matter, which leaves the cost of a launch.
CPU_SIZES = ((2, 64), (64, 256), (512, 256), (1024, 1024), (4096, 1024))
ACCELERATOR_SIZES = ((2, 64), (512, 1024), (4096, 2048), (8192, 8192))
COPY_BYTES = (10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
MORE_COPY_BYTES = (256_000_000, 1_000_000_000)  # on accelerators, whose bandwidth takes that much to fill
LAUNCH_CALLS = 64
# At which ops also run in turn: together they move as much as caches hold, and yet computing is short.
MIXED_SIZE, MIXED_TIMES, MIXED_ROUNDS = (16, 256), 4, 3
TYPICAL_OPERANDS = 2  # of a call, as large as an activation


class Tensors:
    """Operands of one size, made when first asked for: activations of ``rows`` tokens and ``width`` features."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.width, self.dtype, self.device = rows, width, dtype, device

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=self.dtype, device=self.device) + 0.5  # for pow, log and division as well

    @cached_property
    def x(self) -> Tensor:
        return self.random(self.rows, self.width)

    @cached_property
    def y(self) -> Tensor:
        return self.random(self.rows, self.width)

    @cached_property
    def z(self) -> Tensor:
        return self.random(self.rows, self.width)

    @cached_property
    def ones(self) -> Tensor:
        return torch.ones_like(self.x)  # a product in place that is repeated must not end in denormal numbers

    @cached_property
    def row(self) -> Tensor:
        return self.random(self.width)

    @cached_property
    def column(self) -> Tensor:
        return self.random(self.rows, 1)

    @cached_property
    def half(self) -> Tensor:
        return self.random(self.rows, self.width // 2)

    @cached_property
    def one(self) -> Tensor:
        return self.random()

    @cached_property
    def mask(self) -> Tensor:
        return self.y > 1.0

    @cached_property
    def heads(self) -> Tensor:
        """(b, h, s, d), as the transpose of (b, s, h, d) in memory."""
        return self.x.view(-1, min(self.rows, 128), self.width // 64, 64).transpose(1, 2)

    @cached_property
    def ids(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.rows,), device=self.device)

    @cached_property
    def targets(self) -> Tensor:
        return torch.randint(self.width, (self.rows,), device=self.device)

    @property
    def vocabulary(self) -> int:
        return 4 * self.rows

    @cached_property
    def table(self) -> Tensor:
        return self.random(self.vocabulary, self.width)

    @cached_property
    def mean(self) -> Tensor:
        return self.x.mean(-1, keepdim=True).to(self.statistics)

    @property
    def statistics(self) -> torch.dtype:
        """In which normalisations keep mean and deviation."""
        return self.dtype if self.dtype == torch.float64 or self.device.type == "cpu" else torch.float32

    @cached_property
    def probabilities(self) -> Tensor:
        return torch.softmax(self.x, -1)


Arguments = Callable[[Tensors], Sequence[Any]]

# Element by element: one operand and one result as large as an activation, or two operands.
_UNARY = ("neg", "exp", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "silu", "gelu")
_BINARY = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "tanh_backward", "sigmoid_backward", "silu_backward",
    "gelu_backward",
)  # fmt: skip

OPS: tuple[tuple[str, Arguments], ...] = (
    *((name, lambda t: (t.x,)) for name in _UNARY),
    *((name, lambda t: (t.x, t.y)) for name in _BINARY),
    # broadcasts and numbers
    ("add.Tensor", lambda t: (t.x, t.row)),
    ("add.Tensor", lambda t: (t.x, 1.0)),
    ("mul.Tensor", lambda t: (t.x, t.row)),
    ("mul.Tensor", lambda t: (t.x, t.column)),
    ("mul.Tensor", lambda t: (t.x, 0.5)),
    ("mul.Scalar", lambda t: (t.x, 0.5)),
    ("div.Scalar", lambda t: (t.x, 3.0)),
    ("rsub.Scalar", lambda t: (t.x, 1.0)),
    ("pow.Tensor_Scalar", lambda t: (t.x, 2.0)),
    ("pow.Tensor_Scalar", lambda t: (t.x, 3.0)),
    ("where.self", lambda t: (t.mask, t.x, t.y)),
    ("where.self", lambda t: (t.mask, t.x, t.one)),
    ("masked_fill.Scalar", lambda t: (t.x, t.mask, 0.0)),
    ("threshold_backward", lambda t: (t.x, t.y, 0.0)),
    ("native_dropout", lambda t: (t.x, 0.1, True)),
    ("native_dropout_backward", lambda t: (t.x, t.mask, 1.1)),
    # sums: over rows for the gradient of a bias, over features for norms
    ("sum.dim_IntList", lambda t: (t.x, [0], True)),
    ("sum.dim_IntList", lambda t: (t.x, [-1], True)),
    ("mean.dim", lambda t: (t.x, [-1], True)),
    # norms, softmax, loss
    ("native_layer_norm", lambda t: (t.x, [t.width], t.row, t.row, 1e-5)),
    (
        "native_layer_norm_backward",
        lambda t: (t.y, t.x, [t.width], t.mean, t.mean, t.row, t.row, [True, True, True]),
    ),
    ("_fused_rms_norm", lambda t: (t.x, [t.width], t.row, 1e-5)),
    ("_fused_rms_norm_backward", lambda t: (t.y, t.x, [t.width], t.mean, t.row, [True, True])),
    ("_softmax", lambda t: (t.x, -1, False)),
    ("_safe_softmax", lambda t: (t.x, -1)),
    ("_softmax_backward_data", lambda t: (t.y, t.probabilities, -1, t.dtype)),
    ("_log_softmax", lambda t: (t.x, -1, False)),
    ("_log_softmax_backward_data", lambda t: (t.y, t.x, -1, t.dtype)),
    ("nll_loss_forward", lambda t: (t.x, t.targets, None, 1, -100)),
    ("nll_loss_backward", lambda t: (t.one, t.x, t.targets, None, 1, -100, t.one)),
    # rows by number
    ("embedding", lambda t: (t.table, t.ids)),
    ("embedding_dense_backward", lambda t: (t.x, t.ids, t.vocabulary, -1, False)),
    ("index.Tensor", lambda t: (t.table, [t.ids])),
    ("index_put", lambda t: (t.table, [t.ids], t.x, True)),
    # pieces and copies
    ("cat", lambda t: ([t.x, t.y], -1)),
    ("cat", lambda t: ([t.x, t.y], 0)),
    ("slice_backward", lambda t: (t.half, [t.rows, t.width], 1, 0, t.width // 2, 1)),
    ("select_backward", lambda t: (t.x, [t.rows, 3, t.width], 1, 1)),
    ("clone", lambda t: (t.heads, torch.contiguous_format)),
    ("clone", lambda t: (t.heads.transpose(-1, -2), torch.contiguous_format)),
    # in place: results written over operands, the runtime's own sums and copies, and what optimizers are made of
    ("add_.Tensor", lambda t: (t.z, t.y)),
    ("mul_.Tensor", lambda t: (t.z, t.ones)),
    ("div_.Tensor", lambda t: (t.z, t.ones)),
    ("div_.Scalar", lambda t: (t.z, 1.0)),
    ("neg_", lambda t: (t.z,)),
    ("tanh_", lambda t: (t.z,)),
    ("rsqrt_", lambda t: (t.z,)),
    ("relu_", lambda t: (t.z,)),
    ("copy_", lambda t: (t.z, t.y)),
    ("zero_", lambda t: (t.z,)),
    ("mul_.Tensor", lambda t: (t.z, 1.0)),
    ("lerp_.Scalar", lambda t: (t.z, t.y, 0.1)),
    ("addcmul_", lambda t: (t.z, t.x, t.y)),
    ("addcdiv_", lambda t: (t.z, t.x, t.y)),
)
_CONTIGUOUS = ("clone",)  # the second argument is a memory format, which goes by name

# Ops of which not every byte of every operand is read, as ``autoplan.search.pricing`` has them.
_LOOKUPS = {"embedding", "index"}
_PUTS = {"slice_backward", "select_backward", "index_put"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One op at one size. ``op`` is the name without overload."""

    op: str
    call: Call


def cases(size: tuple[int, int], dtype: torch.dtype, device: torch.device, *, once: bool = False) -> Iterator[Case]:
    """Every op at one size of activation, rows and width.

    ``once``: with the first of its operands only, as a launch costs the same with any.
    """
    rows, width = size
    count = cold_sets(device, TYPICAL_OPERANDS * rows * width * dtype.itemsize)
    tensors = tuple(Tensors(rows, width, dtype, device) for _ in range(count))
    seen: set[str] = set()
    for name, arguments in OPS:
        made = case(name, arguments, tensors)
        if not once or made.op not in seen:
            yield made
        seen.add(made.op)


def case(name: str, arguments: Arguments, tensors: Sequence[Tensors]) -> Case:
    op, _, overload = name.partition(".")
    sets, kwargs = tuple(tuple(arguments(each)) for each in tensors), {}
    if op in _CONTIGUOUS:
        sets, kwargs = tuple(args[:1] for args in sets), {"memory_format": sets[0][1]}
    return Case(op=op, call=Call(function=getattr(getattr(aten, op), overload or "default"), sets=sets, kwargs=kwargs))


def moved_bytes(op: str, args: Sequence[Any], results: Any) -> int:
    """Bytes that a call reads and writes."""
    operands = [bytes_of(tensor) for tensor in tensors_of(args)]
    made = [bytes_of(tensor) for tensor in tensors_of(results)]
    if op in _LOOKUPS:
        operands[0] = made[0]
    elif op in _PUTS:
        operands = [2 * size for size in operands]
    elif op == "embedding_dense_backward":
        operands[0] *= 3
    elif op == "nll_loss_forward":
        operands[0] = args[1].numel() * args[0].itemsize
    elif op == "nll_loss_backward":
        operands[1] = 0
    return sum(operands) + sum(made)


def measure_launch(bench: Bench, seconds: float) -> None:
    """What a call costs that has nothing to do."""
    bench.phase("launches", 1, seconds)
    tiny = torch.zeros(1, device=bench.device)
    run = repeated(Call(function=aten.add.Tensor, sets=[(tiny, tiny)]), LAUNCH_CALLS)
    bench.add(record="constant", name="kernel_launch_us", value=bench.time_us(run) / LAUNCH_CALLS)


def measure_ops(bench: Bench, dtype: torch.dtype, precision: str, seconds: float) -> None:
    """Every op of ``OPS`` at every size."""
    sizes = CPU_SIZES if bench.device.type == "cpu" else ACCELERATOR_SIZES
    once = len({name.partition(".")[0] for name, _ in OPS})
    bench.phase("operators", once + len(OPS) * (len(sizes) - 1), seconds)
    for size in sizes:
        for each in cases(size, dtype, bench.device, once=size == sizes[0]):
            time_op(bench, each, precision)


def measure_mixed(bench: Bench, dtype: torch.dtype, seconds: float) -> None:
    """What a call costs more where other ops ran before it, and what one that makes a view costs there.

    The same calls, ``MIXED_TIMES`` of each op, run sorted by op and in turn. Nothing on an accelerator, which is
    behind its host.
    """
    if bench.device.type != "cpu":
        return
    bench.phase("launches in turn", 3 * MIXED_ROUNDS, seconds)
    calls = [each.call for each in cases(MIXED_SIZE, dtype, bench.device) if _result(each.call) is not None]
    views = [
        Call(function=aten.unsqueeze.default, sets=[(tensors_of(operands)[0], 0) for operands in call.sets])
        for call in calls
    ]
    ordered = in_turn([call for call in calls for _ in range(MIXED_TIMES)])
    mixed = in_turn(calls * MIXED_TIMES)
    viewed = in_turn([call for pair in zip(calls, views, strict=True) for call in pair] * MIXED_TIMES)
    rounds = [[bench.time_us(run) for run in (ordered, mixed, viewed)] for _ in range(MIXED_ROUNDS)]
    total = len(calls) * MIXED_TIMES
    changed = total - len(calls)  # calls that followed one of their op where they were sorted
    launch_us = median((mixed_us - ordered_us) / changed for ordered_us, mixed_us, _ in rounds)
    view_us = median((viewed_us - mixed_us) / total for _, mixed_us, viewed_us in rounds)
    bench.add(record="constant", name="mixed_launch_us", value=max(launch_us, 0.0))
    bench.add(record="constant", name="view_launch_us", value=max(view_us, 0.0))


def _result(call: Call) -> Any | None:
    """None where the device has no kernel for it: CPUs have no backward of a fused RMS norm."""
    try:
        return call.function(*call.sets[0], **call.kwargs)
    except NotImplementedError:
        return None


def time_op(bench: Bench, case: Case, precision: str) -> None:
    """Add the row of a case, unless the device has no kernel for it."""
    call = case.call
    result = _result(call)
    if result is None:
        return
    moved, made = moved_bytes(case.op, (*call.sets[0], *call.kwargs.values()), result), bytes_of(result)
    del result
    bench.add(
        record="op", op=case.op, kind="memory", precision=precision, flops=0, bytes_moved=moved, launches=1,
        value=bench.kept_us(call, made),
    )  # fmt: skip


def measure_copies(bench: Bench, seconds: float) -> None:
    """The memory table, for ops that are not in ``OPS``: plain sums of two tensors."""
    sizes = COPY_BYTES if bench.device.type == "cpu" else COPY_BYTES + MORE_COPY_BYTES
    bench.phase("memory", len(sizes), seconds)
    for size in sizes:
        sets = tuple(
            tuple(torch.ones(size // 12, device=bench.device) for _ in range(2))
            for _ in range(cold_sets(bench.device, size * 2 // 3))
        )
        time_op(bench, Case(op="", call=Call(function=aten.add.Tensor, sets=sets)), "fp32")


def measure_adamw(bench: Bench, dtype: torch.dtype, precision: str, seconds: float) -> None:
    """``AdamW.step`` on a dozen tensors of each size."""
    sizes = (1_000, 30_000, 300_000) if bench.device.type == "cpu" else (100_000, 3_000_000, 30_000_000)
    bench.phase("optimizer", len(sizes), seconds)
    for size in sizes:
        params = [torch.nn.Parameter(torch.rand(size, dtype=dtype, device=bench.device)) for _ in range(12)]
        for param in params:
            param.grad = torch.rand_like(param)
        optimizer = torch.optim.AdamW(params, lr=1e-6)
        time_us = bench.time_us(optimizer.step)
        moved = 7 * sum(param.nbytes for param in params)  # parameter, gradient, two moments read; all but one written
        bench.add(
            record="op", op="adamw", kind="memory", precision=precision, flops=0, bytes_moved=moved,
            launches=len(params), value=time_us,
        )  # fmt: skip
