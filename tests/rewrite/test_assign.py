"""Which choices there are: worked out once for a graph, whoever asks."""

from __future__ import annotations

from dataclasses import replace

from autoplan.capture.graph import Sizes
from autoplan.rewrite.assign import class_nodes, class_refinement, legal_choices
from autoplan.rewrite.state import is_integer
from tests.rewrite.models import SEQ, captured

SIZES = Sizes(batch=4, seq=SEQ)


def test_one_refinement_serves_every_plan_of_a_graph() -> None:
    _, graph = captured()
    for class_id in set(graph.depth):
        assert class_refinement(graph, class_id) is class_refinement(graph, class_id)
    assert class_refinement(graph, graph.depth[0]) is not class_refinement(graph, graph.depth[1])
    other = replace(graph)  # nothing that was worked out for a graph is taken for another's
    assert class_refinement(other, graph.depth[0]) is not class_refinement(graph, graph.depth[0])


def test_whole_is_always_legal_and_the_only_choice_on_one_rank() -> None:
    _, graph = captured()
    class_id = graph.depth[1]
    nodes = [node for node in class_nodes(graph, class_id) if not is_integer(node)]
    for node in nodes:
        assert list(legal_choices(graph, class_id, node, SIZES, 1)) == ["*"]
        assert next(iter(legal_choices(graph, class_id, node, SIZES, 2))) == "*"
    assert max(len(legal_choices(graph, class_id, node, SIZES, 2)) for node in nodes) > 3
