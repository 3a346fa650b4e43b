"""The four collectives that local code uses, on a process group or on threads.

Lowered ops and redistributions call these. They go to torch's functional collectives, so they may sit in an fx graph
and run on gloo and NCCL. Inside ``run_ranks`` they go to threads of this process instead: a way to run every rank of
a local program without a process group, for the shard-and-recombine test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch

from autoplan.sharding import _torch_private

T = TypeVar("T")


def all_reduce(tensor: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """``op`` is "sum" or "max"."""
    if (exchange := _EXCHANGE.get()) is None:
        return _torch_private.all_reduce(tensor, op, group_name)
    stacked = torch.stack(exchange.swap(tensor))
    return stacked.amax(0) if op == "max" else stacked.sum(0, dtype=tensor.dtype)


def all_gather(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Pieces of all ranks one after the other along dim 0."""
    if (exchange := _EXCHANGE.get()) is None:
        return _torch_private.all_gather(tensor, degree, group_name)
    return torch.cat(exchange.swap(tensor))


def reduce_scatter(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """The sum over ranks, cut along dim 0."""
    if (exchange := _EXCHANGE.get()) is None:
        return _torch_private.reduce_scatter(tensor, degree, group_name)
    return torch.stack(exchange.swap(tensor)).sum(0, dtype=tensor.dtype).chunk(degree)[exchange.rank()]


def all_to_all(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Piece j of dim 0 goes to rank j; the result holds the received pieces in rank order."""
    if (exchange := _EXCHANGE.get()) is None:
        return _torch_private.all_to_all(tensor, degree, group_name)
    return torch.cat([piece.chunk(degree)[exchange.rank()] for piece in exchange.swap(tensor)])


def run_ranks(body: Callable[[int], T], degree: int) -> list[T]:
    """``[body(0), ..., body(degree - 1)]``, run at the same time on threads whose collectives meet each other."""
    exchange = _Exchange(degree)
    results: list[T | None] = [None] * degree
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        _EXCHANGE.set(exchange)
        exchange.local.rank = rank
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001  (raised again by the caller's thread)
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]  # every body returned


class _Exchange:
    """Where the threads of one ``run_ranks`` meet."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree)
        self.slots: list[torch.Tensor | None] = [None] * degree
        self.local = threading.local()

    def rank(self) -> int:
        rank: int = self.local.rank
        return rank

    def swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        self.slots[self.rank()] = tensor
        self.barrier.wait()
        tensors = [t for t in self.slots if t is not None]
        self.barrier.wait()  # nobody overwrites a slot before all have read
        return tensors


_EXCHANGE: ContextVar[_Exchange | None] = ContextVar("autoplan_exchange", default=None)
