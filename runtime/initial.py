"""First values of a model that is on the meta device: the same as one process would draw, whatever the plan.

*One process* makes every tensor of the model empty on the CPU, seeds torch's generator, and lets the modules initialise
themselves in the order of ``model.modules()`` (``reset_parameters``), or calls the ``init`` that it was given on the
model as a whole. ``initialize`` is that process. ``initial_source`` gives the same tensors by name, one module in
memory at a time: the generator's state before each module is noted once, and the module's own initialisation repeated
from there when one of its tensors is asked for. With ``init`` the whole model is made, since nobody knows what it
touches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autoplan.errors import UserError
from autoplan.runtime.params import Source, module_source

__all__ = ["Init", "initial_source", "initialize", "is_on_meta"]

Init = Callable[[nn.Module], object]


def is_on_meta(module: nn.Module) -> bool:
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def initialize(module: nn.Module, seed: int = 0, init: Init | None = None) -> nn.Module:
    """Give every tensor of a meta-device model memory on the CPU and its first value, in place; returns the model.

    ``init``: called once on the model, in place of each module's ``reset_parameters`` (Hugging Face:
    ``lambda model: model.init_weights()``). Tied parameters stay tied. torch's own generator is left as it was.
    Raises UserError for a module that cannot initialise itself, where no ``init`` is given.
    """
    _require_whole(module)
    if init is None:
        _require_self_made(module)
    made: dict[int, Tensor] = {}
    for part in module.modules():
        _make_empty(part, made)
    with _seeded(seed):
        if init is not None:
            init(module)
        else:
            for part in module.modules():
                _reset(part)
    return module


def initial_source(module: nn.Module, seed: int = 0, init: Init | None = None) -> Source:
    """What ``initialize`` would give, tensor by tensor; the module stays on the meta device. Raises as it does."""
    _require_whole(module)
    if init is not None:
        return module_source(initialize(copy.deepcopy(module), seed, init))
    _require_self_made(module)
    parts = list(module.modules())
    # A tied parameter has the value that its last owner gives it.
    owner = {id(t): at for at, part in enumerate(parts) for t in _own(part).values()}
    name_of = {
        name: (owner[id(t)], id(t))
        for name, t in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    }
    states: list[Tensor] = []
    with _seeded(seed):
        for part in parts:
            states.append(torch.get_rng_state())
            with _materialized(part):
                _reset(part)

    def source(name: str) -> Tensor:
        if name not in name_of:
            raise UserError(f"the model has no parameter or buffer {name!r}; plan again for this model")
        at, identity = name_of[name]
        with _seeded(seed):
            torch.set_rng_state(states[at])
            with _materialized(parts[at]) as made:
                _reset(parts[at])
                return made[identity].detach()

    return source


def _own(part: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module itself, without those of its children."""
    return {n: t for n, t in (*part._parameters.items(), *part._buffers.items()) if t is not None}


def _require_whole(module: nn.Module) -> None:
    if any(not t.is_meta for t in (*module.parameters(), *module.buffers())):
        raise UserError(
            "some of the model's tensors are on the meta device and some are not; build all of it under "
            "torch.device('meta'), or none of it"
        )


def _require_self_made(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if _own(part) and not callable(getattr(part, "reset_parameters", None)):
            what = ", ".join(_own(part))
            raise UserError(
                f"the model is on the meta device, and {name or 'the model itself'} ({type(part).__name__}) has no "
                f"reset_parameters() that would give {what} a first value; add one, or pass init=… (for a Hugging Face "
                "model init=lambda model: model.init_weights())"
            )


def _reset(part: nn.Module) -> None:
    if _own(part):
        part.reset_parameters()  # type: ignore[operator]


def _make_empty(part: nn.Module, made: dict[int, Tensor]) -> None:
    """Replace a module's own meta tensors; ``made``: what has been replaced already, by the identity it had."""
    for held in (part._parameters, part._buffers):
        for name, tensor in held.items():
            if tensor is None:
                continue
            if id(tensor) not in made:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                made[id(tensor)] = (
                    nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else empty
                )
            held[name] = made[id(tensor)]  # type: ignore[assignment]


@contextmanager
def _materialized(part: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Within this context a module's own tensors are real, by the identity that they have on the meta device."""
    before = dict(part._parameters), dict(part._buffers)
    made: dict[int, Tensor] = {}
    try:
        _make_empty(part, made)
        yield made
    finally:
        part._parameters.update(before[0])
        part._buffers.update(before[1])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        yield
