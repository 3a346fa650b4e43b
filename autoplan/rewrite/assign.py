"""Pass 2: every node gets its ``Choice``, every parameter its placement, from the strategies of the plan.

A strategy belongs to a class of layers, so choices are looked up once for each strategy and reused by position in the
layer. Side nodes have no strategy: they are ``*``.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoplan.capture.graph import Graph, Layer, Sizes
from autoplan.errors import LegalityError
from autoplan.plans import Plan, Strategy
from autoplan.rewrite.program import ParamSpec
from autoplan.rewrite.state import State, is_getitem, is_integer, is_side, operands, replicated, result_of
from autoplan.sharding import refine
from autoplan.sharding.placement import Placement
from autoplan.sharding.refinement import Refinement
from autoplan.sharding.registry import result_specs
from autoplan.sharding.rule import Choice


def assign(state: State) -> State:
    """``choices`` of every node of every layer, other stages' too: a tied gradient must suit all of them."""
    by_strategy: dict[str, tuple[Choice | None, ...]] = {}
    choices: dict[str, Choice] = {}
    for layer in state.graph.layers:
        strategy = state.strategy(layer.index)
        if strategy.key not in by_strategy:
            by_strategy[strategy.key] = layer_choices(state.graph, layer, strategy, state.sizes, state.tensor)
        for name, choice in zip(layer.forward + layer.backward, by_strategy[strategy.key], strict=True):
            if choice is not None:
                choices[name] = choice
    for node in state.joint.nodes:
        if is_side(node) and not is_getitem(node):
            choices[node.name] = replicated(node)
    return replace(state, choices=choices)


def layer_choices(
    graph: Graph, layer: Layer, strategy: Strategy, sizes: Sizes, degree: int
) -> tuple[Choice | None, ...]:
    """The choice of each node of ``layer.forward + layer.backward``; None for integers."""
    names = layer.forward + layer.backward
    if strategy.class_id != layer.class_id or len(strategy.choices) != len(names):
        raise LegalityError(
            f"assign: strategy {strategy.key} of class {strategy.class_id} has {len(strategy.choices)} choices, "
            f"layer {layer.index} of class {layer.class_id} has {len(names)} nodes"
        )

    def one(node: fx.Node, wanted: str) -> Choice | None:
        if is_integer(node):
            return None
        found = legal_choices(graph, layer.class_id, node, sizes, degree).get(wanted)
        if found is None:
            raise LegalityError(f"assign: {node.name} ({node.target}) has no choice {wanted!r} at degree {degree}")
        return found

    nodes = class_nodes(graph, layer.class_id)
    return tuple(one(node, wanted) for node, wanted in zip(nodes, strategy.choices, strict=True))


def class_nodes(graph: Graph, class_id: str) -> tuple[fx.Node, ...]:
    """``forward + backward`` of the first layer of a class, which stands for all of them."""
    first = next(layer for layer in graph.layers if layer.class_id == class_id)
    return tuple(graph.node(name) for name in first.forward + first.backward)


def class_refinement(graph: Graph, class_id: str) -> Refinement:
    """Over ``class_nodes``. One serves every rank and every plan that is rewritten from the graph."""

    def make() -> Refinement:
        return refine(n for n in class_nodes(graph, class_id) if not is_integer(n))

    return graph.once(f"refinement of layer class {class_id}", make)


def legal_choices(graph: Graph, class_id: str, node: fx.Node, sizes: Sizes, degree: int) -> dict[str, Choice]:
    """By name; ``node`` is one of ``class_nodes`` and makes tensors. On one rank there is only ``*``."""
    found = {"*": _whole(node)}
    if degree > 1:
        legal = class_refinement(graph, class_id).choices(node, sizes, degree)
        found |= {choice.name: choice for choice in legal if choice.name != "*"}
    return found


def _whole(node: fx.Node) -> Choice:
    """``*`` for a captured node, whose integer operands are still nodes."""
    whole = replicated(node)
    tensors = [n for n in operands(node) if not is_integer(n)]
    return replace(whole, operands=whole.operands[: len(tensors)])


def params_of(state: State) -> tuple[ParamSpec, ...]:
    """The parameters that the stage holds, in the order of ``graph.params``."""
    graph, plan = state.graph, state.plan
    layers = plan.stage_layers(state.stage)
    users = {p.name: [ly.index for ly in graph.layers if p.name in ly.params] for p in graph.params}
    needed = _side_params(state, layers)
    specs = []
    for param in graph.params:
        here = [i for i in users[param.name] if i in layers]
        if not here and param.name not in needed:
            continue
        placement = param_placement(graph, plan, param.name)
        stages = {plan.stage_of(i) for i in users[param.name]}
        zero = plan.layers[users[param.name][0]].zero if users[param.name] else 0
        specs.append(
            ParamSpec(
                name=param.name,
                shape=param.shape,
                dtype=param.dtype,
                trainable=param.trainable,
                tensor=placement,
                zero=zero if param.shape else 0,  # a scalar has no dim to shard
                layer=here[0] if here else layers[0],
                deferred=param.trainable and placement.kind == "R" and _has_partial_term(state, param.name),
                tied_stages=tuple(sorted(stages - {state.stage})) if param.trainable else (),
            )
        )
    return tuple(specs)


def param_placement(graph: Graph, plan: Plan, name: str) -> Placement:
    """Placement on the tensor axis: that in every layer that uses the parameter; R if only side nodes use it."""
    found: dict[Placement, int] = {}
    for layer in graph.layers:
        if name in layer.params:
            text = plan.strategy(layer.index).params[layer.params.index(name)]
            found.setdefault(Placement.parse(text), layer.index)
    if len(found) > 1:
        places = ", ".join(f"{placement} in layer {layer}" for placement, layer in found.items())
        raise LegalityError(f"assign: parameter {name} is tied but placed {places}")
    return next(iter(found), Placement("R"))


def _has_partial_term(state: State, name: str) -> bool:
    nodes = (state.graph.node(term) for term in state.graph.gradients.get(name, ()))
    return any(result_of(node, state.choices).kind == "P" for node in nodes)


def _side_params(state: State, layers: range) -> frozenset[str]:
    """Parameters that the stage's nodes reach through side nodes (frozen ones: a side node sees no other)."""
    by_placeholder = {p.placeholder: p.name for p in state.graph.params}
    nodes = {n.name: n for n in state.joint.nodes}
    todo = [
        source
        for i in layers
        for name in state.graph.layers[i].forward + state.graph.layers[i].backward
        if name in nodes
        for source in nodes[name].all_input_nodes
        if is_side(source)
    ]
    seen: set[str] = set()
    found: set[str] = set()
    while todo:
        node = todo.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.op == "placeholder":
            if node.name in by_placeholder:
                found.add(by_placeholder[node.name])
        else:
            todo.extend(node.all_input_nodes)
    return frozenset(found)


def check_assigned(state: State) -> None:
    """Every call has a choice, with one placement for each operand and result; a layer that makes a term of a gradient
    holds its parameter, so that no stage makes one that it would have to drop."""
    for name, terms in state.graph.gradients.items():
        for term in terms:
            layer = state.graph.node(term).meta["layer"]
            if layer is not None and name not in state.graph.layers[layer].params:
                raise LegalityError(
                    f"assign: layer {layer} makes {term} of the gradient of {name}, which it does not hold"
                )
    for node in state.joint.nodes:
        if node.op != "call_function" or (is_getitem(node) and is_side(node)):
            continue
        choice = state.choices.get(node.name)
        if choice is None:
            raise LegalityError(f"assign: {node.name} belongs to no layer's strategy and is no side node")
        if len(choice.operands) != len(operands(node)) or len(choice.results) != len(result_specs(node)):
            raise LegalityError(
                f"assign: choice {choice.name!r} of {node.name} places {len(choice.operands)} operands and "
                f"{len(choice.results)} results; the call has {len(operands(node))} and {len(result_specs(node))}"
            )
