"""Run every rank of a set of stage programs in one process: the second rung of the ladder of proof.

Each rank is a thread. The collectives of its graphs meet those of the other threads of its group instead of a process
group: a dispatch mode serves the operators by group name. What a collective has begun to make is NaN until it is
waited for, so that a read too early is seen in the result.

    results = interpret(programs, params=..., batches=..., groups=...)
    results.losses, results.gradients
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.plans import Degrees
from autoplan.rewrite.collectives import shard_rows
from autoplan.rewrite.program import Coordinate, ParamSpec, StageProgram
from autoplan.sharding.redistribution import cut, join

T = TypeVar("T")
Tensor = torch.Tensor
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Results:
    """What one micro-batch on every data rank gave.

    Gradients are whole tensors, summed over data ranks, stages and terms.
    """

    losses: tuple[Tensor, ...]  # by data rank
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # new values, from data rank 0


def group_name(axis: str, coordinate: Coordinate) -> str:
    """The name that ``interpret`` knows the group of ``coordinate`` on ``axis`` by."""
    others = [a for a in ("pipe", "data", "tensor") if a != axis]
    return "/".join([axis, *(f"{a}{getattr(coordinate, a)}" for a in others)])


def groups_of(coordinate: Coordinate, degrees: Degrees) -> dict[str, str]:
    """The ``groups`` argument of ``rewrite`` for the rank at ``coordinate``."""
    return {axis: group_name(axis, coordinate) for axis in ("data", "tensor") if getattr(degrees, axis) > 1}


def coordinates(degrees: Degrees) -> list[Coordinate]:
    return [
        Coordinate(pipe=p, data=d, tensor=t)
        for p in range(degrees.pipe)
        for d in range(degrees.data)
        for t in range(degrees.tensor)
    ]


def interpret(
    programs: Mapping[Coordinate, StageProgram],
    degrees: Degrees,
    params: Mapping[str, Tensor],  # whole
    batches: Sequence[Sequence[Tensor]],  # by data rank: one tensor for each of StageProgram.inputs
    buffers: Mapping[str, Tensor] | None = None,
) -> Results:
    """One forward and one backward on every rank; the tangent is 1."""
    wires = {c: (queue.Queue[Any](), queue.Queue[Any]()) for c in programs}
    meeting = Meeting(list(programs), degrees)

    def body(at: Coordinate) -> tuple[Any, ...]:
        return _run_rank(at, programs[at], degrees, wires, (params, buffers or {}, batches[at.data]))

    ran = meeting.run(body)
    last = degrees.pipe - 1
    losses = tuple(
        _same([ran[Coordinate(pipe=last, data=d, tensor=t)][0] for t in range(degrees.tensor)], "the loss")
        for d in range(degrees.data)
    )
    updates: dict[str, Tensor] = {}
    for at, (_, _, new) in ran.items():
        if at.data == at.tensor == 0:
            updates |= new
    return Results(losses=losses, gradients=_gradients(programs, degrees, ran), buffers=updates)


def local_piece(spec: ParamSpec, whole: Tensor, at: Coordinate, degrees: Degrees) -> Tensor:
    """What the rank holds of a parameter."""
    piece = cut(whole, spec.tensor, at.tensor, degrees.tensor) if spec.tensor.kind == "S" else whole
    if spec.zero < 3 or degrees.data == 1:
        return piece.clone()
    first, count = shard_rows(piece.shape, at.data, degrees.data)
    return piece[first : first + count].clone()


def _run_rank(
    at: Coordinate,
    program: StageProgram,
    degrees: Degrees,
    wires: Mapping[Coordinate, tuple[queue.Queue[Any], queue.Queue[Any]]],
    given: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Sequence[Tensor]],
) -> tuple[Any, ...]:
    params, buffers, batch = given
    held = [local_piece(p, params[p.name], at, degrees) for p in program.params]
    held += [buffers[name] for name in program.buffers]
    held += batch
    first, last = program.stage == 0, program.stage == program.stages - 1
    entering = [] if first else wires[at][0].get(timeout=TIMEOUT_S)
    _check_local(program.activations, entering)
    results = program.forward(*held, *entering)
    outputs = results[: len(program.outputs)]
    saved = results[len(outputs) : len(outputs) + len(program.saved)]
    updates = dict(zip(program.buffer_updates, results[len(outputs) + len(saved) :], strict=True))
    _check_local(program.outputs, outputs)
    if last:
        gradients: Sequence[Tensor] = [torch.ones_like(outputs[0])]
    else:
        wires[_next(at, 1)][0].put(outputs)
        gradients = wires[at][1].get(timeout=TIMEOUT_S)
    returned = program.backward(*held, *saved, *gradients)
    crossing = sum(v.grad for v in program.activations)
    if not first:
        wires[_next(at, -1)][1].put(returned[:crossing])
    trainable = [p for p in program.params if p.trainable]
    return outputs[0], dict(zip([p.name for p in trainable], returned[crossing:], strict=True)), updates


def _next(at: Coordinate, step: int) -> Coordinate:
    return Coordinate(pipe=at.pipe + step, data=at.data, tensor=at.tensor)


def _check_local(specs: Sequence[Any], values: Sequence[Tensor]) -> None:
    for spec, value in zip(specs, values, strict=True):
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            raise AssertionError(f"{spec.name} is {tuple(value.shape)} {value.dtype}, its spec says {spec}")


def _gradients(
    programs: Mapping[Coordinate, StageProgram], degrees: Degrees, ran: Mapping[Coordinate, tuple[Any, ...]]
) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for pipe in range(degrees.pipe):
        program = programs[Coordinate(pipe=pipe, data=0, tensor=0)]
        for spec in (p for p in program.params if p.trainable):
            by_tensor = []
            for t in range(degrees.tensor):
                terms = [ran[Coordinate(pipe=pipe, data=d, tensor=t)][1][spec.name] for d in range(degrees.data)]
                rows = spec.zero >= 2 and degrees.data > 1
                by_tensor.append(torch.cat(terms) if rows else torch.stack(terms).sum(0))
            if spec.deferred:
                whole = torch.stack(by_tensor).sum(0)
            elif spec.tensor.kind == "S":
                whole = join(by_tensor, spec.tensor)
            else:
                whole = _same(by_tensor, spec.name)
            total[spec.name] = total[spec.name] + whole if spec.name in total else whole
    return total


def _same(copies: Sequence[Tensor], what: str) -> Tensor:
    """The one value of what should be alike on every rank."""
    for other in copies[1:]:
        torch.testing.assert_close(other, copies[0], msg=f"ranks differ in {what}")
    return copies[0]


class Meeting:
    """Threads, one for each rank, that meet in the collectives of their groups."""

    def __init__(self, ranks: Sequence[Coordinate], degrees: Degrees) -> None:
        self.ranks = ranks
        self.members: dict[str, list[Coordinate]] = {}
        for at in self.ranks:
            for name in groups_of(at, degrees).values():
                self.members.setdefault(name, []).append(at)
        self.barriers = {name: threading.Barrier(len(members)) for name, members in self.members.items()}
        self.slots: dict[str, dict[Coordinate, Tensor]] = {name: {} for name in self.members}

    def run(self, body: Callable[[Coordinate], T]) -> dict[Coordinate, T]:
        results: dict[Coordinate, T] = {}
        errors: list[BaseException] = []

        def one(at: Coordinate) -> None:
            try:
                with torch.no_grad(), _Served(self, at):
                    results[at] = body(at)
            except BaseException as error:  # noqa: BLE001  (handed on below: a thread would only print it)
                errors.append(error)
                for barrier in self.barriers.values():
                    barrier.abort()

        threads = [threading.Thread(target=one, args=(at,), daemon=True) for at in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError | queue.Empty)]
        if errors:
            raise (first or errors)[0]
        return results

    def swap(self, name: str, at: Coordinate, value: Tensor) -> list[Tensor]:
        """The values of all members, in rank order."""
        self.slots[name][at] = value
        self.barriers[name].wait(TIMEOUT_S)
        values = [self.slots[name][member] for member in self.members[name]]
        self.barriers[name].wait(TIMEOUT_S)
        return values


class _Served(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types neither of these two
    """Serves the collective operators of one rank."""

    def __init__(self, meeting: Meeting, at: Coordinate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meeting = meeting
        self.at = at
        self.begun: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what was handed out, and what it will hold

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        serve = _SERVED.get(str(func))
        if serve is not None:
            return serve(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def place(self, name: str) -> int:
        return self.meeting.members[name].index(self.at)

    def begin(self, result: Tensor) -> Tensor:
        handed = torch.full_like(result, float("nan")) if result.is_floating_point() else torch.zeros_like(result)
        self.begun[id(handed)] = (handed, result)
        return handed

    def all_reduce(self, tensor: Tensor, op: str, name: str) -> Tensor:
        stacked = torch.stack(self.meeting.swap(name, self.at, tensor))
        return self.begin(stacked.amax(0) if op == "max" else stacked.sum(0, dtype=tensor.dtype))

    def all_gather(self, tensor: Tensor, degree: int, name: str) -> Tensor:
        return self.begin(torch.cat(self.meeting.swap(name, self.at, tensor)))

    def reduce_scatter(self, tensor: Tensor, op: str, degree: int, name: str) -> Tensor:
        total = torch.stack(self.meeting.swap(name, self.at, tensor)).sum(0, dtype=tensor.dtype)
        return self.begin(total.chunk(degree)[self.place(name)].clone())

    def all_to_all(self, tensor: Tensor, out: list[int], into: list[int], name: str) -> Tensor:
        values = self.meeting.swap(name, self.at, tensor)
        return self.begin(torch.cat([torch.split(value, into)[self.place(name)] for value in values]))

    def wait(self, tensor: Tensor) -> Tensor:
        begun = self.begun.pop(id(tensor), None)
        return tensor if begun is None else tensor.copy_(begun[1])

    def all_gather_matmul(self, shard: Tensor, weight: Tensor, dim: int, name: str) -> Tensor:
        return torch.cat(self.meeting.swap(name, self.at, shard), dim) @ weight

    def all_gather_matmul_with_input(self, shard: Tensor, weight: Tensor, dim: int, name: str) -> tuple[Tensor, Tensor]:
        whole = torch.cat(self.meeting.swap(name, self.at, shard), dim)
        return whole @ weight, whole

    def matmul_reduce_scatter(self, x: Tensor, weight: Tensor, dim: int, name: str) -> Tensor:
        values = self.meeting.swap(name, self.at, x @ weight)
        return torch.stack(values).sum(0).chunk(len(values), dim)[self.place(name)].contiguous()


_SERVED: dict[str, Callable[..., Any]] = {
    "_c10d_functional.all_reduce.default": _Served.all_reduce,
    "_c10d_functional.all_gather_into_tensor.default": _Served.all_gather,
    "_c10d_functional.reduce_scatter_tensor.default": _Served.reduce_scatter,
    "_c10d_functional.all_to_all_single.default": _Served.all_to_all,
    "_c10d_functional.wait_tensor.default": _Served.wait,
    "autoplan.all_gather_matmul.default": _Served.all_gather_matmul,
    "autoplan.all_gather_matmul_with_input.default": _Served.all_gather_matmul_with_input,
    "autoplan.matmul_reduce_scatter.default": _Served.matmul_reduce_scatter,
}
