"""Whether a plan that was handed in, rather than searched for here, fits the graph it is to run.

The fingerprint says what a plan was made for, not that nobody has edited it since. Everything a plan names is looked
up here, so that one message says what is wrong and what would be right, before any rank starts to train. What passes
may still be a poor plan; it can be rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from autoplan.capture.graph import Graph, Layer, Sizes
from autoplan.errors import PlanFileError
from autoplan.plans import Plan, Strategy
from autoplan.rewrite.assign import class_nodes, class_refinement, legal_choices
from autoplan.rewrite.state import is_getitem, is_integer, operands, source_of
from autoplan.sharding.placement import Placement, R
from autoplan.sharding.rule import Choice


def require_valid(graph: Graph, plan: Plan) -> None:
    """Raise PlanFileError naming the strategy and the node (or parameter, or layer) that do not fit, and what would."""
    layers: dict[str, Layer] = {}
    for layer in graph.layers:
        layers.setdefault(layer.class_id, layer)
    sizes = Sizes(batch=plan.micro_batch, seq=plan.fingerprint.seq)
    for strategy in plan.strategies:
        if strategy.class_id not in layers:
            raise _refusal(
                f"strategy {strategy.key!r} is for layer class {strategy.class_id!r}, which the model lacks; it has "
                f"{_listed(layers)}"
            )
        _require_choices(graph, strategy, sizes, plan.degrees.tensor)
        _require_params(graph, strategy, layers[strategy.class_id], plan.degrees.tensor)
        _require_boundary(graph, strategy, layers[strategy.class_id], sizes, plan.degrees.tensor)
    _require_layers(graph, plan)


def _require_layers(graph: Graph, plan: Plan) -> None:
    """One strategy of the right class for every layer; tied parameters alike in all of them."""
    if len(plan.layers) != len(graph.depth):
        raise _refusal(f"it decides {len(plan.layers)} layers, the model has {len(graph.depth)}")
    for index, class_id in enumerate(graph.depth):
        strategy = plan.strategy(index)
        if strategy.class_id != class_id:
            fitting = _listed(s.key for s in plan.strategies if s.class_id == class_id)
            raise _refusal(
                f"layer {index} is of class {class_id!r}, its strategy {strategy.key!r} is for {strategy.class_id!r}; "
                f"the plan has {fitting} for it"
            )
    placed: dict[str, tuple[str, str]] = {}
    for layer in graph.layers:
        strategy = plan.strategy(layer.index)
        for name, text in zip(layer.params, strategy.params, strict=True):
            first, key = placed.setdefault(name, (text, strategy.key))
            if text != first:
                raise _refusal(
                    f"strategy {strategy.key!r} places {name} as {text}, strategy {key!r} as {first}; layers that "
                    "share a parameter must place it alike"
                )


def _require_choices(graph: Graph, strategy: Strategy, sizes: Sizes, degree: int) -> None:
    nodes = class_nodes(graph, strategy.class_id)
    _require_count(strategy, "choices", strategy.choices, "node", [n.name for n in nodes])
    chosen: dict[str, Choice] = {}
    for node, wanted in zip(nodes, strategy.choices, strict=True):
        if is_integer(node):
            continue
        legal = legal_choices(graph, strategy.class_id, node, sizes, degree)
        if wanted not in legal:
            raise _refusal(
                f"strategy {strategy.key!r} has {wanted!r} for {node.name} ({node.target}); at tensor degree {degree} "
                f"it has {_listed(legal)}"
            )
        chosen[node.name] = legal[wanted]
        _require_partials(strategy, node, wanted, chosen)


def _require_partials(strategy: Strategy, node: fx.Node, wanted: str, chosen: Mapping[str, Choice]) -> None:
    """What a choice takes as Partial must be made so in the layer: no data movement makes a Partial."""
    if is_getitem(node):
        sources = [(source_of(node), int(node.args[1]))]  # type: ignore[arg-type]
    else:
        sources = [(operand, 0) for operand in operands(node) if not is_integer(operand)]
    for (source, index), placement in zip(sources, chosen[node.name].operands, strict=True):
        have = chosen[source.name].results[index] if source.name in chosen else R
        if placement.kind == "P" != have.kind:
            raise _refusal(
                f"strategy {strategy.key!r} has {wanted!r} for {node.name}, which takes {source.name} as partial "
                f"sums; there it lies as {have}"
            )


def _require_params(graph: Graph, strategy: Strategy, layer: Layer, degree: int) -> None:
    _require_count(strategy, "placements of parameters", strategy.params, "parameter", layer.params)
    refinement = class_refinement(graph, strategy.class_id)
    for name, text in zip(layer.params, strategy.params, strict=True):
        holder = graph.node(graph.param(name).placeholder)
        # a parameter's shape holds no symbol
        legal = refinement.placements(holder, Sizes(batch=1), degree) if degree > 1 else (R,)
        if text not in map(str, legal):
            raise _refusal(
                f"strategy {strategy.key!r} places {name} as {text!r}; at tensor degree {degree} it may be "
                f"{_listed(map(str, legal))}"
            )


def _require_boundary(graph: Graph, strategy: Strategy, layer: Layer, sizes: Sizes, degree: int) -> None:
    for kind, texts, names in (
        ("boundary_in", strategy.boundary_in, layer.inputs),
        ("boundary_out", strategy.boundary_out, layer.outputs),
    ):
        _require_count(strategy, f"placements in {kind}", texts, "value", names)
        for name, text in zip(names, texts, strict=True):
            shape = graph.node(name).meta["specs"][0].at(sizes)
            if not _divides(text, shape, degree):
                dims = [f"S{dim}" for dim, size in enumerate(shape) if degree > 1 and size % degree == 0]
                raise _refusal(
                    f"strategy {strategy.key!r} places {name} in {kind} as {text!r}; a tensor of shape {shape} on "
                    f"{degree} ranks may be {_listed(['R', *dims])}"
                )


def _divides(text: str, shape: tuple[int, ...], degree: int) -> bool:
    """Whether the text is R, or a Shard of a dim that its blocks and the ranks divide."""
    try:
        placement = Placement.parse(text)
    except ValueError:
        return False
    if placement.kind != "S":
        return placement == R
    if degree == 1 or placement.dim >= len(shape) or placement.blocks < 1:
        return False
    return shape[placement.dim] % (degree * placement.blocks) == 0


def _require_count(strategy: Strategy, what: str, given: Sequence[str], one: str, names: Sequence[str]) -> None:
    if len(given) == len(names):
        return
    lacking = f"; the first {one} without is {names[len(given)]}" if len(given) < len(names) else ""
    raise _refusal(
        f"strategy {strategy.key!r} has {len(given)} {what}, layers of class {strategy.class_id!r} have {len(names)} "
        f"{one}s{lacking}"
    )


def _refusal(text: str) -> PlanFileError:
    return PlanFileError(f"the plan does not fit the model: {text}. Plan again with `autoplan plan`.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
