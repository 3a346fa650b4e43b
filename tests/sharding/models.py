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

from autoplan.capture import capture
from autoplan.capture.graph import TensorSpec


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
    return capture(model, {"input_ids": ids, "labels": ids}).fx


def single(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """One call; each ``T(...)`` among its arguments becomes a placeholder."""
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


def bools(*shape: int) -> T:
    return T(*shape, dtype=torch.bool)


def _fixed(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(map(sympy.Integer, value.shape)), hint=tuple(value.shape), dtype=value.dtype)


def calls(graph: fx.Graph) -> Sequence[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and "specs" in n.meta]
