"""One traced graph of loss and gradients, with symbolic batch and sequence sizes; no weight is ever allocated.

The module runs once on fake tensors of the CPU kind, whatever device its weights are on (or none: the meta device
works), so the same graph comes out on a laptop and on a cluster. What is device-specific is bound later, by the
rewrite.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture import _torch_private as private
from autoplan.capture.attention import OneAttention
from autoplan.capture.experts import OneGroupedProduct
from autoplan.capture.random import KEY, KEY_SIZE, CountedRandom
from autoplan.errors import ModelError

Batch = Any  # what the user passes: a dict of keyword arguments, a tuple of positional ones, or one tensor
LossFn = Callable[[Any, Any], Tensor]  # (model output, batch) -> scalar

TRACED_BATCH = 5  # any size >= 2 that no kernel treats specially; the graph does not depend on it


class Promote(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context a cast to float32 becomes a cast to float64, and float32 factories make float64.

    Model code that casts to float32 inside norms, rotary tables and losses would otherwise hide errors below 1e-7
    from a float64 comparison. Used on both sides of such a comparison.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def promote(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        args = [promote(a) for a in args]
        return func(*args, **{k: promote(v) for k, v in (kwargs or {}).items()})


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One tensor of the batch: its place, its symbolic shape, and the dim that counts rows (None: the same for all
    rows)."""

    path: str
    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A raw joint graph. Its placeholders are, in order, ``params``, ``buffers``, ``leaves`` and the tangent; its
    outputs the loss and a gradient (or None) for each parameter. A buffer's new value is a ``copy_`` onto its
    placeholder. The last leaf is the key of all random numbers."""

    module: fx.GraphModule
    params: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[tuple[str, Tensor], ...]
    leaves: tuple[Leaf, ...]
    batch: torch.SymInt
    seq: torch.SymInt | None
    aliases: Mapping[str, tuple[str, ...]]  # parameter name -> its other names
    persistent: frozenset[str]  # names of buffers that a state dict holds

    @property
    def fixed_batch(self) -> bool:
        """The model uses the number of rows as a plain number, so the graph is for the traced batch alone."""
        return private.size_expr(self.batch).is_Integer is True


def _opened(batch: Batch) -> Batch:
    """The batch in containers that pytree looks into: any mapping as a dict, dataclasses made known to torch."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):  # a tokenizer's BatchEncoding, say
        batch = dict(batch)
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(batch) if is_dataclass(leaf)}:
        for kind in unknown:
            torch.export.register_dataclass(kind)
    return batch


def batch_leaves(batch: Batch) -> list[tuple[str, Any]]:
    """The leaves of a batch with a readable path for each: ``input_ids``, ``0``, ``images.left``."""
    flat, _ = pytree.tree_flatten_with_path(_opened(batch))
    return [
        (
            pytree.keystr(path).replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").lstrip(".")
            or "batch",
            leaf,
        )
        for path, leaf in flat
    ]


def batch_rows(batch: Batch) -> int:
    """Rows of a batch: the first dim of its first tensor. Raises ModelError when there is no tensor."""
    for _, leaf in batch_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    raise ModelError("the batch holds no tensor with a batch dim; pass a dict of the model's keyword arguments")


def batch_seq(batch: Batch) -> int | None:
    """Tokens in a row: dim 1 of the first 2-d integer tensor (token ids); None when there is none."""
    for _, leaf in batch_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point() and leaf.shape[1] > 1:
            return int(leaf.shape[1])
    return None


def trace(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None = None,
    *,
    precision: torch.dtype | None = None,
    promote: bool = False,
) -> Trace:
    """Trace forward, loss and backward of ``model`` on ``batch`` (only shapes and dtypes of it matter).

    precision: cast floating parameters to this dtype first (the module itself is not touched).
    promote: also turn casts to float32 inside the model into float64 (for float64 comparisons).

    Raises ModelError: control flow that depends on data (with the user's source line), no scalar loss, no trainable
    parameter.
    """
    found = _trace(model, batch, loss_fn, precision, promote, TRACED_BATCH)
    rows = batch_rows(batch)
    if found.fixed_batch and rows != TRACED_BATCH:
        if rows == 1:
            raise ModelError(
                "the model uses the number of rows of its batch as a plain number (len(x), say) and the batch has one; "
                "give it at least two"
            )
        found = _trace(model, batch, loss_fn, precision, promote, rows)
    return found


def _trace(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    precision: torch.dtype | None,
    promote: bool,
    traced_batch: int,
) -> Trace:
    rows, tokens = batch_rows(batch), batch_seq(batch)
    world = private.FakeWorld()
    names, hints = (["batch"], [traced_batch]) if tokens is None else (["batch", "seq"], [traced_batch, tokens])
    symbols = world.symbols(names, hints)
    symbolic_batch, symbolic_seq = symbols[0], symbols[1] if tokens is not None else None

    params = tuple(model.named_parameters())
    buffers = tuple(model.named_buffers())
    leaves = tuple(
        _leaf(path, leaf, rows, tokens, symbolic_batch, symbolic_seq)
        for path, leaf in batch_leaves(batch)
        if isinstance(leaf, Tensor)
    )
    leaves += (Leaf(path=KEY, shape=(KEY_SIZE,), dtype=torch.int64, batch_dim=None),)

    def cast(dtype: torch.dtype) -> torch.dtype:
        return precision if precision is not None and dtype.is_floating_point else dtype

    def cast_buffer(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if promote and dtype == torch.float32 else dtype

    fake_params = [world.empty(p.shape, cast(p.dtype)).requires_grad_(p.requires_grad) for _, p in params]
    fake_buffers = [world.empty(b.shape, cast_buffer(b.dtype)) for _, b in buffers]
    fake_leaves = [world.empty(leaf.shape, cast_buffer(leaf.dtype)) for leaf in leaves]
    if not any(p.requires_grad for _, p in params):
        raise ModelError("the model has no parameter with requires_grad=True, so there is nothing to train")
    trainable = [i for i, (_, p) in enumerate(params) if p.requires_grad]

    def joint(ps: list[Tensor], bs: list[Tensor], xs: list[Tensor], tangent: Tensor) -> list[Tensor | None]:
        state = {name: p for (name, _), p in zip(params, ps, strict=True)}
        held = {name: b for (name, _), b in zip(buffers, bs, strict=True)}
        state.update(held)
        with ExitStack() as stack:
            if promote:
                stack.enter_context(Promote())  # type: ignore[no-untyped-call]
            with OneAttention(), OneGroupedProduct(), CountedRandom(xs[-1], symbolic_batch):
                loss = _call(model, state, _refill(batch, xs[:-1]), loss_fn)
            private.stamp_backward(loss)
            wanted = [ps[i] for i in trainable]
            grads = torch.autograd.grad(loss, wanted, grad_outputs=tangent.to(loss.dtype), allow_unused=True)
        full: list[Tensor | None] = [None] * len(ps)
        for i, grad in zip(trainable, grads, strict=True):
            full[i] = grad
        return [loss, *full]

    tangent = world.empty((), torch.float64 if promote else torch.float32)
    try:
        with world.mode, private.quiet():
            args = (fake_params, fake_buffers, fake_leaves, tangent)
            module = private.trace(joint, args)
            if any(_mutates(n) for n in module.graph.nodes):
                module = private.functionalize(module, args)
    except ModelError:
        raise
    except private.DATA_DEPENDENT_ERRORS as error:
        raise ModelError(_data_dependent_message(error, model)) from None
    except Exception as error:
        raise ModelError(_failed_message(error, model)) from error
    return Trace(
        module=module,
        params=params,
        buffers=buffers,
        leaves=leaves,
        batch=symbolic_batch,
        seq=symbolic_seq,
        aliases=_aliases(model),
        persistent=_persistent_buffers(model),
    )


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    others: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), name)
        if known != name:
            others[known] = (*others.get(known, ()), name)
    return others


def _persistent_buffers(model: nn.Module) -> frozenset[str]:
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    )


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _leaf(
    path: str, leaf: Tensor, rows: int, tokens: int | None, batch: torch.SymInt, seq: torch.SymInt | None
) -> Leaf:
    """Dim 0 counts rows when it has as many; a later dim is the sequence when it has as many tokens."""
    shape: list[int | torch.SymInt] = list(leaf.shape)
    batch_dim = 0 if leaf.dim() and leaf.shape[0] == rows else None
    if batch_dim is not None:
        shape[0] = batch
    # Only integer and mask-like leaves surely count tokens; features of the same size would be mistaken for them.
    if seq is not None and (not leaf.is_floating_point() or leaf.dim() >= 3):
        last = leaf.dim() - 1 if leaf.is_floating_point() and leaf.dim() == 3 else leaf.dim()
        for dim in range(1 if batch_dim is not None else 0, last):
            if shape[dim] == tokens:
                shape[dim] = seq
    return Leaf(path=path, shape=tuple(shape), dtype=leaf.dtype, batch_dim=batch_dim)


def _refill(batch: Batch, tensors: Sequence[Tensor]) -> Batch:
    flat, spec = pytree.tree_flatten(_opened(batch))
    fresh = iter(tensors)
    return pytree.tree_unflatten([next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)


def _call(model: nn.Module, state: Mapping[str, Tensor], batch: Batch, loss_fn: LossFn | None) -> Tensor:
    args, kwargs = call_arguments(batch)
    if "use_cache" in inspect.signature(model.forward).parameters and "use_cache" not in kwargs:
        kwargs["use_cache"] = False  # a key-value cache is of no use in training and holds every layer's keys
    output = torch.func.functional_call(model, _by_place(model, state), args, kwargs, tie_weights=False)
    return find_loss(output, batch, loss_fn)


def _by_place(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with a name for every module that holds a tensor, once for each module and its tensor.

    ``functional_call`` may tie names itself, but of a module that stands in the model under two names it then puts
    back, by the second name, what it had put there by the first.
    """
    given = {
        id(tensor): state[name] for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in state
    }
    places = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) in given:
                places[f"{path}.{name}" if path else name] = given[id(tensor)]
    return places


def call_arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed to the model: a mapping as keywords, a tuple or list as positions, anything else as one
    argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def find_loss(output: Any, batch: Batch, loss_fn: LossFn | None) -> Tensor:
    """The scalar to train: ``loss_fn(output, batch)``, the output itself, its ``.loss``, ``["loss"]`` or first item."""
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(output, batch)
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, Tensor):
        loss = output
    elif hasattr(output, "loss"):
        loss = output.loss
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}"
        hint = (
            "loss_fn must return one floating scalar"
            if loss_fn is not None
            else "the model must return a scalar loss (give it labels in the batch), or pass "
            "loss_fn=lambda output, batch: …"
        )
        raise ModelError(f"no scalar loss: got {got}; {hint}")
    if not loss.requires_grad:
        raise ModelError("the loss does not depend on any trainable parameter (is it computed under no_grad?)")
    return loss.reshape(())


def user_line(error: BaseException, model: nn.Module) -> str:
    """``file:line: source`` of the innermost frame that is the model's code rather than torch's or ours."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, torchs, "<"))]
    if not frames:
        return f"in {type(model).__name__}.forward"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}: {(last.line or '').strip()}"


def _data_dependent_message(error: BaseException, model: nn.Module) -> str:
    return (
        f"the model's control flow depends on the values of a tensor, at\n  {user_line(error, model)}\n"
        "A plan needs one graph for every batch: use torch.where, a mask, or decide outside the model."
    )


def _failed_message(error: BaseException, model: nn.Module) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, TypeError) and "argument" in str(error) and ".forward()" in str(error):
        return (
            f"the model cannot be called with this batch: {text[0]}. A mapping is passed as keyword arguments, all of "
            "it; "
            "what only loss_fn needs must be an argument that forward ignores (labels=None)."
        )
    return (
        f"the model could not be traced, at\n  {user_line(error, model)}\n"
        f"  {type(error).__name__}: {text[0] if text else 'no message'}\n"
        "If it runs eagerly on this batch, the operation on that line has no fake-tensor or backward support in torch."
    )
