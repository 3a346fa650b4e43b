"""Bytes: what parameters, gradients and optimizer state take under a precision policy and ZeRO, and peaks of liveness.

ZeRO (Rajbhandari et al. 2020) shards over the data axis: stage 1 the optimizer state and master copy, stage 2 also the
gradients, stage 3 also the parameters. A tensor is cut along its first dim and every rank holds the size of the largest
shard: uneven cuts are padded, so sizes round up.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoplan.cost_models.errors import UserError
from autoplan.cost_models.fields import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes that one parameter element takes, by kind. ``compute`` names the arithmetic (a ``Device`` precision)."""

    name: str
    compute: str
    param_bytes: int
    grad_bytes: int  # as accumulated and reduced
    master_bytes: int  # fp32 copy that the optimizer updates; 0 where the parameter itself is updated
    optimizer_bytes: int  # two moments (Adam)
    activation_bytes: int  # one element of a saved activation

    @property
    def total_bytes(self) -> int:
        """All of it, for one parameter element that is not sharded."""
        return self.param_bytes + self.grad_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def moment_bytes(self) -> int:
        """One optimizer moment."""
        return self.optimizer_bytes // 2


PRECISIONS = {
    policy.name: policy
    for policy in (
        Precision(
            name="fp64",
            compute="fp64",
            param_bytes=8,
            grad_bytes=8,
            master_bytes=0,
            optimizer_bytes=16,
            activation_bytes=8,
        ),
        Precision(
            name="fp32",
            compute="fp32",
            param_bytes=4,
            grad_bytes=4,
            master_bytes=0,
            optimizer_bytes=8,
            activation_bytes=4,
        ),
        # 16-bit parameters and arithmetic; gradients summed, master copy and moments kept in fp32: 18 bytes in all,
        # as Megatron-LM does with fp32 gradient accumulation.
        Precision(
            name="bf16",
            compute="bf16",
            param_bytes=2,
            grad_bytes=4,
            master_bytes=4,
            optimizer_bytes=8,
            activation_bytes=2,
        ),
        Precision(
            name="fp16",
            compute="fp16",
            param_bytes=2,
            grad_bytes=4,
            master_bytes=4,
            optimizer_bytes=8,
            activation_bytes=2,
        ),
    )
}


def precision(name: str) -> Precision:
    """The policy of that name."""
    if name not in PRECISIONS:
        raise UserError(f"no precision policy is called {name!r}; {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


def shard_elements(elements: Any, degree: int, rows: Any = None) -> Any:
    """Elements of the largest of ``degree`` shards, cut along a first dim of ``rows`` (default: ``elements``)."""
    if rows is None:
        return -(-elements // degree)
    return -(-rows // degree) * (elements // rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes on one rank, by kind; each a number or an array with an entry for each tensor or layer."""

    param_bytes: Any
    grad_bytes: Any
    master_bytes: Any
    optimizer_bytes: Any

    @property
    def total_bytes(self) -> Any:
        return self.param_bytes + self.grad_bytes + self.master_bytes + self.optimizer_bytes

    def summed(self) -> "StateBytes":
        """Over tensors or layers."""
        return StateBytes(
            param_bytes=int(np.sum(self.param_bytes)),
            grad_bytes=int(np.sum(self.grad_bytes)),
            master_bytes=int(np.sum(self.master_bytes)),
            optimizer_bytes=int(np.sum(self.optimizer_bytes)),
        )


def state_bytes(
    elements: Any, policy: Precision, *, zero: int, data: int, rows: Any = None, moments: int = 2
) -> StateBytes:
    """Bytes that parameters of ``elements`` elements take on one of ``data`` ranks under ZeRO stage ``zero`` (0 to 3).

    ``elements`` and ``rows`` (first-dim sizes) may be numbers or arrays, one entry for each tensor; ``moments`` is the
    number of optimizer states (Adam 2, momentum 1, plain SGD 0).
    """
    if zero not in (0, 1, 2, 3):
        raise UserError(f"ZeRO stage {zero!r} does not exist; use 0, 1, 2 or 3")
    if data < 1:
        raise UserError(f"the data degree must be at least 1, not {data!r}")
    shard = shard_elements(elements, data, rows)
    return StateBytes(
        param_bytes=(shard if zero >= 3 else elements) * policy.param_bytes,
        grad_bytes=(shard if zero >= 2 else elements) * policy.grad_bytes,
        master_bytes=(shard if zero >= 1 else elements) * policy.master_bytes,
        optimizer_bytes=(shard if zero >= 1 else elements) * policy.moment_bytes * moments,
    )


# gloo, which CPU ranks use, reduces a copy and hands out the chunk, and gathers into a flat tensor that is copied from:
# 16 MB for a call on 16 MB. It works in place for the other kinds, and so does NCCL for all.
_COPIED = {"cpu": ("reduce_scatter", "all_gather")}


def collective_copy_bytes(kind: str, size_bytes: int, device_type: str) -> int:
    """What torch's backend of a device type (``Device.backend``) allocates of its own while a collective runs.

    ``size_bytes`` as ``collective_time_us`` has it.
    """
    return size_bytes if kind in _COPIED.get(device_type, ()) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessPeak:
    """The step with most bytes live, and the indices of the values that are live there."""

    peak_bytes: int
    step: int
    live: tuple[int, ...]


def live_bytes(
    sizes: npt.ArrayLike, first_use: npt.ArrayLike, last_use: npt.ArrayLike, steps: int | None = None
) -> npt.NDArray[Any]:
    """Bytes live at each step, where value ``i`` is live from step ``first_use[i]`` to ``last_use[i]``, both included.

    ``sizes`` may have further axes (candidate micro-batches, say); the result is [steps, *further axes].
    """
    size, first, last = np.asarray(sizes), np.asarray(first_use, dtype=np.int64), np.asarray(last_use, dtype=np.int64)
    assert len(size) == len(first) == len(last), "one size, first and last use for each value"
    assert bool(np.all(first >= 0)), "steps are numbered from 0"
    assert bool(np.all(last >= first)), "a value's last use is not before its first"
    count = (int(last.max()) + 1 if len(last) else 0) if steps is None else steps
    # +size where a value appears, -size just after its last use; the running sum is what is live.
    changes = np.zeros((count + 1, *size.shape[1:]), dtype=size.dtype if size.size else np.int64)
    np.add.at(changes, first, size)
    np.subtract.at(changes, last + 1, size)
    total: npt.NDArray[Any] = np.cumsum(changes[:-1], axis=0)
    return total


def liveness_peak(sizes: npt.ArrayLike, first_use: npt.ArrayLike, last_use: npt.ArrayLike) -> LivenessPeak:
    """The greatest ``live_bytes`` (first such step) and what is live there; arguments as ``live_bytes``, sizes 1-D."""
    total = live_bytes(sizes, first_use, last_use)
    if not len(total):
        return LivenessPeak(peak_bytes=0, step=0, live=())
    step = int(np.argmax(total))
    live = np.flatnonzero((np.asarray(first_use) <= step) & (np.asarray(last_use) >= step))
    return LivenessPeak(peak_bytes=int(total[step]), step=step, live=tuple(int(index) for index in live))
