"""The text of rules: what parses, what is refused and how, and what a test on the spot refutes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.capture.graph import Sizes
from autoplan.errors import RuleError
from autoplan.sharding import refine, register_rule, registry, rule_for, verify_choice
from autoplan.sharding.registry import parse_rule

from .models import T, single

aten = torch.ops.aten


def test_a_rule_reads_like_an_einsum() -> None:
    assert parse_rule("m k, k n -> m n") == (((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),))
    assert parse_rule("(b s) 1 -> b s") == (((("b", "s"), ()),), ((("b",), ("s",)),))
    assert parse_rule("k, k -> .") == (((("k",),), (("k",),)), ((),))
    assert parse_rule("-> a, b") == ((), ((("a",),), (("b",),)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m k, k n", "'->'"),
        ("m -> k -> n", "'->'"),
        ("m (k n -> m", "does not close"),
        ("m k) -> m", "never opened"),
        ("m () -> m", "holds no letter"),
        ("((a b)) -> a", "nests"),
        ("m m -> m", "twice"),
        ("m, -> m", "empty"),
        ("m ->", "empty"),
        ("m + k -> m", r"holds '\+'"),
        ("m . -> m", "mixes"),
        ("(m 1) -> m", "1 inside"),
        ("m 2 -> m", "holds '2'"),
    ],
)
def test_bad_text_is_refused_with_the_remedy(text: str, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        parse_rule(text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="mkn1().,-> ", max_size=16))
def test_any_text_parses_or_raises_rule_error(text: str) -> None:
    try:
        operands, results = parse_rule(text)
    except RuleError:
        return
    for dims in (*operands, *results):
        letters = [letter for dim in dims for letter in dim]
        assert len(letters) == len(set(letters))


@pytest.fixture
def _restore_rules() -> object:
    saved = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(saved)


@pytest.mark.usefixtures("_restore_rules")
def test_a_wrong_rule_is_refuted_when_registered_with_an_example() -> None:
    example = (torch.randn(6, 12, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64))
    register_rule(aten.mm.default, "m k, k n -> m n", linear=((0,), (1,)), example=example)
    with pytest.raises(RuleError, match="refuted"):
        register_rule(aten.mm.default, "m k, k n -> m n", linear=((0, 1),), example=example)
    for target, text in [(aten._softmax.default, "a b -> a b"), (aten.cumsum.default, "a b -> a b")]:
        args = (example[0], 1, False) if target is aten._softmax.default else (example[0], 1)
        with pytest.raises(RuleError, match="refuted"):
            register_rule(target, text, example=args)
        register_rule(target, text, fixed="b", example=args)
    with pytest.raises(RuleError, match="refuted"):
        register_rule(aten.exp.default, "a b -> a b", linear=((0,),), example=(example[0],))


@pytest.mark.usefixtures("_restore_rules")
def test_a_rule_for_an_op_of_ones_own() -> None:
    node = single(aten.outer.default, T(4), T(6))
    register_rule(node.target, "a, b -> a b", linear=((0,), (1,)))
    choices = refine(node.graph.nodes).choices(node, Sizes(batch=1), 2)
    assert [c.name for c in choices] == ["*", "a", "b"]  # placeholders are never Partial, so no "+"
    for choice in choices:
        verify_choice(node, choice, Sizes(batch=1), 2)


@pytest.mark.usefixtures("_restore_rules")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a -> a", "called with 2 and 1"),
        ("a b c, a b -> a b", "gives 3 dims"),
        ("a b, b a -> a b", "reads a dim"),
        ("(a c) b, (a c) b -> (a c) b", "open"),
    ],
)
def test_a_rule_that_does_not_fit_the_call_is_named(text: str, says: str) -> None:
    register_rule("aten.add.Tensor", text)
    with pytest.raises(RuleError, match=says):
        rule_for(single(aten.add.Tensor, T(4, 6), T(4, 6)))


def test_letters_that_are_not_there_cannot_be_fixed_nor_operands_linear() -> None:
    with pytest.raises(RuleError, match="no such letter"):
        register_rule("aten.add.Tensor", "a, a -> a", fixed="z")
    with pytest.raises(RuleError, match="number the linear"):
        register_rule("aten.add.Tensor", "a, a -> a", linear=((2,),))


def test_an_op_without_a_rule_is_replicated() -> None:
    node = single(aten.cholesky.default, T(4, 4))
    assert not registry.has_rule(node)
    (only,) = refine(node.graph.nodes).choices(node, Sizes(batch=1), 2)
    assert str(only.operands[0]) == "R"
    assert only.name == "*"
