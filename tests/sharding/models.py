"""Small joint graphs to test rules on: real models captured, and single ops.

Nodes carry ``specs`` and ``expr`` as ``autoplan.capture.graph`` promises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import transformers
from torch import fx

from autoplan.capture.graph import BATCH, SEQ, TensorSpec
from autoplan.capture.trace import trace


@functools.cache
def captured(name: str) -> fx.Graph:
    """The joint graph of a model of two small layers."""
    config = {
        "gpt2": transformers.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, vocab_size=96, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        ),
        "llama": transformers.LlamaConfig(
            num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=120,
        ),
    }[name]  # fmt: skip
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(4, 16, dtype=torch.long, device="meta")
    traced = trace(model, {"input_ids": ids, "labels": ids})
    traced.module.graph.eliminate_dead_code()
    annotate(traced.module.graph, {str(traced.batch.node.expr): BATCH, str(traced.seq.node.expr): SEQ})
    return traced.module.graph


def annotate(graph: fx.Graph, symbols: dict[str, sympy.Symbol]) -> None:
    """Fill ``specs`` and ``expr`` from the fake values that tracing left."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["specs"] = (_spec(value, symbols),)
        elif isinstance(value, list | tuple):
            node.meta["specs"] = tuple(_spec(v, symbols) for v in value if isinstance(v, torch.Tensor))
        elif isinstance(value, int | torch.SymInt):
            node.meta["expr"] = _expr(value, symbols)


def _spec(value: torch.Tensor, symbols: dict[str, sympy.Symbol]) -> TensorSpec:
    hint = tuple(int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in value.shape)
    return TensorSpec(shape=tuple(_expr(s, symbols) for s in value.shape), hint=hint, dtype=value.dtype)


def _expr(size: int | torch.SymInt, symbols: dict[str, sympy.Symbol]) -> sympy.Expr:
    if isinstance(size, int):
        return sympy.Integer(size)
    expr = size.node.expr
    return sympy.expand(expr.subs({s: symbols[str(s)] for s in expr.free_symbols}))


def single(
    target: Callable[..., Any], *args: Any, dtype: dict[int, torch.dtype] | None = None, **kwargs: Any
) -> fx.Node:
    """One call on tensors. A tuple of ints in a list ``[4, 6]`` stays; a ``T(shape)`` becomes a placeholder."""
    graph = fx.Graph()
    examples: dict[fx.Node, torch.Tensor] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, T):
            return value
        node = graph.placeholder(f"a{len(examples)}")
        examples[node] = torch.zeros(value.shape, dtype=value.dtype, device="meta")
        node.meta["specs"] = (_fixed(examples[node]),)
        return node

    given_args, given_kwargs = fx.node.map_aggregate(args, place), fx.node.map_aggregate(kwargs, place)
    node = graph.call_function(target, given_args, given_kwargs)
    result = target(
        *fx.node.map_arg(given_args, lambda n: examples[n]), **fx.node.map_arg(given_kwargs, lambda n: examples[n])
    )
    results = result if isinstance(result, list | tuple) else [result]
    node.meta["specs"] = tuple(_fixed(r) for r in results if isinstance(r, torch.Tensor))
    return node


class T:
    """A tensor argument of ``single``."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = shape, dtype


def ints(*shape: int) -> T:
    return T(*shape, dtype=torch.int64)


def _fixed(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(map(sympy.Integer, value.shape)), hint=tuple(value.shape), dtype=value.dtype)


def calls(graph: fx.Graph) -> Sequence[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and "specs" in n.meta]
