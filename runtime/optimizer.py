"""The user's optimizer, on this rank's masters.

``factory(params) -> torch.optim.Optimizer`` is the whole interface. The tensors it gets are pieces or shards, with as
many dims as the parameters have; an optimizer that treats each element by itself does exactly what it would do on the
whole. Others (Muon, LBFGS, Adafactor) would silently do something else, so they are refused where anything is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn, optim

from autoplan.errors import UserError
from autoplan.runtime.params import HeldParam, ParamStore

OptimizerFactory = Callable[[list[nn.Parameter]], optim.Optimizer]

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip


def default_factory(lr: float = 1e-3) -> OptimizerFactory:
    return lambda params: optim.AdamW(params, lr=lr)


def build_optimizer(
    store: ParamStore, factory: OptimizerFactory | None = None, *, elementwise: bool = False
) -> optim.Optimizer:
    """Make the optimizer. ``elementwise=True`` vouches for a class that is not in ``ELEMENTWISE``."""
    masters = [master for _, master in store.trainable]
    if not masters:  # a stage may hold nothing to train; torch refuses an optimizer of nothing
        masters = [nn.Parameter(torch.zeros(0, device=store.axes.device))]
    optimizer = (factory or default_factory())(masters)
    if not isinstance(optimizer, optim.Optimizer):
        raise UserError(f"the optimizer factory returned {type(optimizer).__name__}; return a torch.optim.Optimizer")
    cut = sorted(held.spec.name for held, _ in store.trainable if is_cut(store, held))
    if cut and type(optimizer) not in ELEMENTWISE and not elementwise:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UserError(
            f"{type(optimizer).__name__} may not treat each element by itself, and this plan cuts {len(cut)} "
            f"parameters ({cut[0]}, …). Use one of {known}; or, if it does, pass elementwise=True."
        )
    return optimizer


def is_cut(store: ParamStore, held: HeldParam) -> bool:
    """Whether a rank has less than the whole of the parameter."""
    degrees = store.axes.degrees
    return (held.spec.tensor.kind == "S" and degrees.tensor > 1) or (not held.whole and degrees.data > 1)
