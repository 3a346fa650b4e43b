"""The shard-and-recombine test can fail: every wrong placement of a right choice is refuted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoplan.capture.graph import Sizes
from autoplan.errors import RuleError
from autoplan.sharding import P, R, S, refine, verify_choice

from .models import T, ints, single

aten = torch.ops.aten
SIZES = Sizes(batch=1)


@pytest.mark.parametrize(
    "node",
    [
        single(aten.mm.default, T(4, 8), T(8, 12)),
        single(aten._log_softmax.default, T(4, 8), 1, False),
        single(aten.embedding.default, T(8, 4), ints(4, 12)),
        single(aten.native_layer_norm.default, T(4, 8, 3), [3], T(3), T(3), 1e-5),
        single(aten.nll_loss_forward.default, T(4, 8), ints(4), None, 1, -100),
        single(aten.cat.default, [T(4, 8), T(4, 8)], 1),
    ],
    ids=lambda n: str(n.target),
)
def test_wrong_results_are_refuted(node: torch.fx.Node) -> None:
    for choice in refine(node.graph.nodes).choices(node, SIZES, 2):
        verify_choice(node, choice, SIZES, 2)
        for i, right in enumerate(choice.results):
            shape = node.meta["specs"][i].shape
            wrong = {R, P, *(S(d) for d in range(len(shape))), *(S(d, 2) for d in range(len(shape)))} - {right}
            for placement in wrong:
                mutated = replace(choice, results=(*choice.results[:i], placement, *choice.results[i + 1 :]))
                with pytest.raises((RuleError, ValueError, RuntimeError)):
                    verify_choice(node, mutated, SIZES, 2)


def test_wrong_operands_are_refuted() -> None:
    node = single(aten.mm.default, T(4, 8), T(8, 12))
    by_name = {c.name: c for c in refine(node.graph.nodes).choices(node, SIZES, 2)}
    with pytest.raises(RuleError, match="refuted"):
        verify_choice(node, replace(by_name["k"], operands=(S(1), S(0, 2))), SIZES, 2)  # blocks that do not match
    with pytest.raises(RuleError, match="refuted"):
        verify_choice(node, replace(by_name["*"], operands=(P, P), results=(P,)), SIZES, 2)  # bilinear, not linear


def test_a_lowering_that_is_left_out_is_refuted() -> None:
    node = single(aten._log_softmax.default, T(4, 8), 1, False)
    choice = next(c for c in refine(node.graph.nodes).choices(node, SIZES, 2) if c.lowering)
    with pytest.raises(RuleError, match="refuted"):
        verify_choice(node, replace(choice, lowering=None), SIZES, 2)
