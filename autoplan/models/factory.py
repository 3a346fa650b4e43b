"""``package.module:factory``: a function of the user's own that returns the module, or (module, batch function).

    def tiny():
        def batch(rows, seq):
            ids = torch.randint(0, 256, (rows, seq))
            return {"ids": ids, "targets": ids.roll(-1, 1)}
        return MyModel(), batch

The module is called with the batch as keywords and must return its loss (or an output with ``.loss``). Without a batch
function the module must take ``input_ids`` and ``labels`` and have ``config.vocab_size``. The current directory is
importable, as it is for ``python -m``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.errors import ModelError
from autoplan.models.spec import Batch, BatchFn, ModelSpec


def from_factory(spec: str) -> ModelSpec:
    factory = _find(spec)

    def build() -> nn.Module:
        return _call(factory, spec)[0]

    with torch.device("meta"):
        module, batch_fn = _call(factory, spec)
    vocab_size = getattr(getattr(module, "config", None), "vocab_size", None)
    return ModelSpec(
        name=spec.partition(":")[2],
        spec=spec,
        build=build,
        make_batch=batch_fn or _default_batch(module, spec),
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
    )


def _find(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and itself imports something that is not
        raise ModelError(
            f"cannot import {error.name!r} for {spec}; run where it can be imported, or install it"
        ) from None
    factory: Callable[[], Any] | None = getattr(module, attribute, None)
    if not callable(factory):
        known = sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
        raise ModelError(f"{module_name} has no function {attribute!r}; it has {', '.join(known) or 'none'}")
    return factory


def _call(factory: Callable[[], Any], spec: str) -> tuple[nn.Module, BatchFn | None]:
    made = factory()
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
        return made[0], made[1]
    raise ModelError(f"{spec} returned {type(made).__name__}; return an nn.Module, or (module, batch function)")


def _default_batch(module: nn.Module, spec: str) -> BatchFn:
    names = inspect.signature(module.forward).parameters
    vocab_size = getattr(getattr(module, "config", None), "vocab_size", None)
    if not {"input_ids", "labels"} <= set(names) or not isinstance(vocab_size, int):
        raise ModelError(
            f"{spec}: cannot tell what {type(module).__name__} is fed with; return (module, batch), where "
            "batch(rows, seq) gives the dict of tensors it is called with"
        )

    def make(rows: int, seq: int) -> Batch:
        ids = torch.randint(0, vocab_size, (rows, seq))
        return {"input_ids": ids, "labels": ids}

    return make
