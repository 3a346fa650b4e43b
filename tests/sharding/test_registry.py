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
    register_rule(node.target, "a, b -> a b")
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
    registry.declare_rule("aten.add.Tensor", text)
    with pytest.raises(RuleError, match=says):
        rule_for(single(aten.add.Tensor, T(4, 6), T(4, 6)))


@pytest.fixture(scope="module")
def own_ops() -> torch.library.Library:
    """``test_rules::gated(x [b s d], w [d k], g [k]) -> [b s k]`` and ``test_rules::scaled(x, factor)``."""
    library = torch.library.Library("test_rules", "DEF")
    library.define("gated(Tensor x, Tensor w, Tensor g) -> Tensor")
    library.define("scaled(Tensor x, float factor) -> Tensor")
    library.impl("gated", lambda x, w, g: (x @ w) * torch.sigmoid(g), "CompositeExplicitAutograd")
    library.impl("scaled", lambda x, factor: x * factor, "CompositeExplicitAutograd")
    return library


@pytest.mark.usefixtures("_restore_rules", "own_ops")
def test_an_op_of_one_s_own_is_tested_on_tensors_made_from_the_text() -> None:
    register_rule("test_rules::gated", "b s d, d k, k -> b s k")
    node = single(torch.ops.test_rules.gated.default, T(4, 6, 8), T(8, 12), T(12))
    refinement = refine(node.graph.nodes)
    assert [c.name for c in refinement.choices(node, Sizes(batch=1), 2)] == ["*", "b", "s", "d", "k"]
    assert rule_for(node).linear == ((0,), (1,))  # and not in the gate
    with pytest.raises(RuleError, match=r"refuses tensors of shapes \(6, 12, 18\), \(18, 6\), \(18,\)"):
        register_rule("test_rules::gated", "b s d, d k, d -> b s k")
    with pytest.raises(RuleError, match="reads a dim"):
        register_rule("test_rules::gated", "b s d, d k, k -> b s d")


@pytest.mark.usefixtures("_restore_rules", "own_ops")
def test_what_cannot_be_made_up_is_asked_for() -> None:
    with pytest.raises(RuleError, match=r"'factor' beside .*example="):
        register_rule("test_rules::scaled", "a b -> a b")
    register_rule("test_rules::scaled", "a b -> a b", example=(torch.randn(6, 12, dtype=torch.float64), 3.0))
    with pytest.raises(RuleError, match="no operator 'test_rules::gatde'; did you mean test_rules::gated"):
        register_rule("test_rules::gatde", "a b -> a b")


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
