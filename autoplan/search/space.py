"""The candidates: every way to lay devices out over pipe, data and tensor, with every micro-batch that divides.

    pipe × data × tensor = devices          pipe ≤ layers; tensor divides something in the model
    data × micro_batch × micro_batches = global batch

Where there are at least as many micro-batches as stages the schedule is 1F1B; GPipe takes as long and holds more
activations, so it is left to the candidates that 1F1B cannot run. What is left out is kept with its reason. Pins
narrow the space; a pin that leaves nothing is refused with the choices that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoplan.capture.graph import Graph
from autoplan.cost_models.pipeline import SCHEDULES
from autoplan.errors import BatchError, DegreeError
from autoplan.plans import Degrees, Recompute, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """Decisions that the caller has made already; None leaves a choice to the search."""

    pipe: int | None = None
    data: int | None = None
    tensor: int | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    zero: int | None = None
    recompute: Recompute | None = None
    fused_matmul: bool | None = None  # the caller's decision or the replay's: sums do not know the ring

    def __post_init__(self) -> None:
        for name in ("pipe", "data", "tensor", "micro_batch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DegreeError(
                    f"Pins({name}={value!r}): give a whole number of at least 1, or None to leave it free"
                )
        for name, valid in (("zero", (0, 1, 2, 3)), ("recompute", ("none", "full")), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value is not None and value not in valid:
                raise DegreeError(f"Pins({name}={value!r}): use one of {', '.join(map(str, valid))}, or None")

    def __str__(self) -> str:
        named = [(name, getattr(self, name)) for name in self.__slots__]
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in named if value is not None) or "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One mesh, micro-batch and schedule; layers are still to be decided."""

    degrees: Degrees
    micro_batch: int
    micro_batches: int
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.degrees}, {self.micro_batches} micro-batches of {self.micro_batch}, {self.schedule}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A candidate that was left out before pricing, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    candidates: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def tensor_divides(graph: Graph) -> Callable[[int], bool]:
    """Whether a tensor degree divides a dim of some parameter that has at least two."""
    dims = {dim for param in graph.params if len(param.shape) > 1 for dim in param.shape}
    return lambda degree: degree == 1 or any(dim % degree == 0 for dim in dims)


def attention_heads(graph: Graph) -> tuple[tuple[str, int], ...]:
    """("attention heads" or "key-value heads", how many) of every attention call, distinct, fewest last."""
    counts: set[tuple[str, int]] = set()
    for node in graph.fx.nodes:
        if str(node.target) == "autoplan.attention.default":
            q, k = (int(operand.meta["specs"][0].shape[1]) for operand in node.args[:2])
            counts.add(("attention heads", q) if q == k else ("key-value heads", k))
    return tuple(sorted(counts, key=lambda pair: -pair[1]))


def enumerate_space(
    *,
    devices: int,
    layers: int,
    global_batch: int,
    divides: Callable[[int], bool],
    pins: Pins | None = None,
    widest_tensor: int | None = None,
    heads: Sequence[tuple[str, int]] = (),
) -> Space:
    """All candidates, in a fixed order. Raises DegreeError or BatchError where the pins, or the batch, leave none.

    ``widest_tensor``: the largest tensor degree to look at unless it is pinned; None for any. ``heads``: what a pinned
    tensor degree must divide; the search itself only lacks the choice of sharding by head where it does not.
    """
    pins = pins or Pins()
    if global_batch < 1:
        raise BatchError(f"the global batch must be at least 1, not {global_batch}")
    dropped: list[Dropped] = []
    meshes = _meshes(devices, layers, divides, pins, dropped, widest_tensor or devices)
    for what, count in heads:
        if pins.tensor is not None and count % pins.tensor:
            valid = [d for d in divisors(devices) if all(n % d == 0 for _, n in heads)]
            raise DegreeError(
                f"tensor {pins.tensor} does not divide the model's {count} {what}; use one of {_list(valid)}"
            )
    candidates = [c for degrees in meshes for c in _micro_batches(degrees, global_batch, pins, dropped)]
    if not candidates:
        _refuse_batch(meshes, global_batch, pins)
    return Space(candidates=tuple(candidates), dropped=tuple(dropped))


def _meshes(
    devices: int,
    layers: int,
    divides: Callable[[int], bool],
    pins: Pins,
    dropped: list[Dropped],
    widest_tensor: int,
) -> list[Degrees]:
    choices = divisors(devices)
    for name in ("pipe", "data", "tensor"):
        pinned = getattr(pins, name)
        if pinned is not None and pinned not in choices:
            raise DegreeError(f"{name} {pinned} does not divide {devices} devices; use one of {_list(choices)}")
    if pins.pipe is not None and pins.pipe > layers:
        raise DegreeError(
            f"pipe {pins.pipe} needs as many layers, the model has {layers}; "
            f"use one of {_list(d for d in choices if d <= layers)}"
        )
    if pins.tensor is not None and not divides(pins.tensor):
        raise DegreeError(
            f"tensor {pins.tensor} divides no dim of any parameter; "
            f"use one of {_list(d for d in choices if divides(d))}"
        )
    meshes = []
    for pipe in choices:
        for tensor in divisors(devices // pipe):
            degrees = Degrees(pipe=pipe, data=devices // pipe // tensor, tensor=tensor)
            if any(getattr(pins, n) not in (None, getattr(degrees, n)) for n in ("pipe", "data", "tensor")):
                continue
            if pipe > layers:
                dropped.append(Dropped(what=str(degrees), why=f"{pipe} stages, but {layers} layers"))
            elif tensor > widest_tensor and pins.tensor is None:
                dropped.append(Dropped(what=str(degrees), why=f"tensor {tensor} leaves the node; pin it to look at it"))
            elif not divides(tensor):
                dropped.append(Dropped(what=str(degrees), why=f"no dim of any parameter is a multiple of {tensor}"))
            else:
                meshes.append(degrees)
    if not meshes:
        raise DegreeError(
            f"no mesh of {devices} devices has {pins} (pipe × data × tensor = {devices}, pipe at most {layers}); "
            "leave one of them free"
        )
    return meshes


def _micro_batches(degrees: Degrees, global_batch: int, pins: Pins, dropped: list[Dropped]) -> list[Candidate]:
    if global_batch % degrees.data:
        dropped.append(Dropped(what=str(degrees), why=f"data {degrees.data} does not divide a batch of {global_batch}"))
        return []
    result = []
    for micro_batch in divisors(global_batch // degrees.data):
        micro_batches = global_batch // degrees.data // micro_batch
        if pins.micro_batch not in (None, micro_batch):
            continue
        enough = micro_batches >= degrees.pipe
        schedule: Schedule = pins.schedule or ("1f1b" if enough else "gpipe")
        if schedule != "gpipe" and not enough:
            dropped.append(
                Dropped(
                    what=f"{degrees}, micro-batch {micro_batch}",
                    why=f"{schedule} needs a micro-batch for each of {degrees.pipe} stages, there are {micro_batches}",
                )
            )
            continue
        result.append(
            Candidate(degrees=degrees, micro_batch=micro_batch, micro_batches=micro_batches, schedule=schedule)
        )
    return result


def _refuse_batch(meshes: list[Degrees], global_batch: int, pins: Pins) -> None:
    degrees = [d.data for d in meshes if global_batch % d.data == 0]
    if not degrees:
        data = min(d.data for d in meshes)
        below, above = global_batch // data * data, (global_batch // data + 1) * data
        sizes = _list(size for size in (below, above, 2 * above) if size)
        raise BatchError(
            f"a global batch of {global_batch} is not divided by any data degree of {_list(d.data for d in meshes)}; "
            f"use a batch of {sizes}"
        )
    if pins.micro_batch is not None and all(global_batch // d % pins.micro_batch for d in degrees):
        choices = {size for d in degrees for size in divisors(global_batch // d)}
        raise BatchError(
            f"micro-batch {pins.micro_batch} does not divide the {_list(global_batch // d for d in degrees)} rows of a "
            f"data rank; use one of {_list(choices)}"
        )
    micro = pins.micro_batch or 1
    choices = {d.pipe for d in meshes if global_batch % (d.data * micro) == 0}
    most = max(global_batch // d // micro for d in degrees)
    raise DegreeError(
        f"1f1b needs at least as many micro-batches as stages: pipe {_list(choices)}, at most {most} micro-batches of "
        f"{micro}. Use pipe up to {most}, a smaller micro-batch, a larger global batch, or the gpipe schedule"
    )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(str(n) for n in sorted(set(numbers))) or "none"
