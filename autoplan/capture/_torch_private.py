"""The private torch APIs that capture stands on, in one place. Known good: torch 2.13.

- ``FakeTensorMode``/``ShapeEnv``: tensors without storage whose sizes may be symbols;
- ``make_fx``: runs a function on them and writes down every ATen call, the backward ones included;
- ``setup_stacktrace_preservation_hooks``: stamps each backward call with the sequence number of the forward call it
    belongs to.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

_NUMBER = "autoplan_seq_nr"  # in what torch copies from a node to those that come of it
DATA_DEPENDENT_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch logs the traceback of a fake kernel that refuses its operands; the error that is raised says it as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class FakeWorld:
    """Makes fake tensors that share one set of symbols; see ``symbol`` and ``empty``."""

    def __init__(self) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)

    def symbols(self, names: Sequence[str], hints: Sequence[int]) -> list[torch.SymInt]:
        """One fresh symbolic size for each name; hints must be at least 2 (0 and 1 would be specialised away)."""
        # A symbol is born as a size of a fake tensor; DYNAMIC (not DUCK) keeps equal hints apart.
        base = torch.empty(*hints, device="meta")
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints)
        )
        fake = self.mode.from_tensor(base, symbolic_context=context, source=ConstantSource("_".join(names)))
        return list(fake.shape)  # type: ignore[arg-type]

    def empty(self, shape: Sequence[int | torch.SymInt], dtype: torch.dtype) -> torch.Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def trace(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """Every ATen call ``function(*args)`` makes on fake tensors, with ``seq_nr`` in each node's meta."""
    # The Python dispatcher picks decompositions that keep sizes symbolic where the C++ kernels would fix them.
    with fx_traceback.preserve_node_meta(), enable_python_dispatcher():
        module: fx.GraphModule = make_fx(function, _allow_non_fake_inputs=True)(*args)
    return module


def stamp_backward(loss: torch.Tensor) -> None:
    """From here on, calls made by the backward of ``loss`` carry their forward's sequence number."""
    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])


def size_expr(value: int | torch.SymInt) -> sympy.Expr:
    """The sympy expression behind a size, with every known equality applied."""
    if isinstance(value, torch.SymInt):
        node = value.node
        return node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr
    return sympy.Integer(value)


def conditions(value: torch.SymInt) -> list[sympy.Basic]:
    """What has been asked about the sizes of a trace and was so, each as a sympy condition."""
    env = value.node.shape_env
    return [] if env is None else [guard.expr for guard in env.guards]


def size_hint(value: int | torch.SymInt) -> int:
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def bound_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, defaults included."""
    named = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {**named, **dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}


def functionalize(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The same graph with every in-place call written as its out-of-place twin; a change of an input becomes one
    ``copy_``. Calls keep their sequence numbers: running them again would give each a new one."""
    flat, spec = pytree.tree_flatten(args)
    for node in module.graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), _NUMBER: node.meta.get("seq_nr")}

    def run(*tensors: Any) -> Any:
        return fx.Interpreter(module).run(*pytree.tree_unflatten(tensors, spec))

    made = trace(lambda *tensors: torch.func.functionalize(run, remove="mutations")(*tensors), flat)
    for node in made.graph.nodes:
        node.meta.pop("seq_nr", None)
        number = node.meta.get("custom", {}).get(_NUMBER)
        if number is not None:
            node.meta["seq_nr"] = number
    return made
