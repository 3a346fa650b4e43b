"""Pass 3: which layers, parameters and boundary values belong to the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.errors import LegalityError
from autoplan.rewrite.assign import params_of
from autoplan.rewrite.state import Crossing, StageCut, State, is_side
from autoplan.sharding.placement import Placement, R


def cut(state: State) -> State:
    """``cut``: what crosses to and from this stage, and what it holds."""
    outputs = (Crossing(value=state.graph.loss, gradient=state.graph.tangent, placement=R),)
    return replace(
        state,
        cut=StageCut(
            layers=state.plan.stage_layers(state.stage),
            activations=crossings(state, state.stage - 1) if state.stage else (),
            outputs=outputs if state.last else crossings(state, state.stage),
            params=params_of(state),
        ),
    )


def crossings(state: State, stage: int) -> tuple[Crossing, ...]:
    """Values that cross from ``stage`` to the next, in graph order.

    One used two stages on passes through the stage between.
    """
    graph, plan = state.graph, state.plan
    split = plan.cuts[stage + 1]  # the first layer after the cut
    producers = {name: layer for layer in graph.layers for name in layer.outputs}
    crossing = {
        name
        for layer in graph.layers[split:]
        for name in layer.inputs
        if name in producers and producers[name].index < split
    }
    values = [n.name for n in state.joint.nodes if n.name in crossing]
    gradients = _gradients(state, values, split)
    found = []
    for name in values:
        producer = producers[name]
        wire = plan.strategy(producer.index).boundary_out[producer.outputs.index(name)]
        found.append(Crossing(value=name, gradient=gradients.get(name, ""), placement=Placement.parse(wire)))
    return tuple(found)


def _gradients(state: State, values: Sequence[str], split: int) -> dict[str, str]:
    """What the layers from ``split`` on hand back, each gradient beside a value of its shape: where several fit, beside
    the one that it is paired with in a layer."""
    layers = state.graph.layers
    made = {name for layer in layers[split:] for name in layer.backward} | {state.graph.tangent}
    used = {
        source.name
        for node in state.joint.nodes
        if node.meta.get("phase") == "backward" and (owner := node.meta.get("layer")) is not None and owner < split
        for source in node.all_input_nodes
        if source.name in made
    }
    pairs = [
        (name, gradient)
        for layer in layers
        for name, gradient in (
            *zip(layer.inputs, layer.grads_out, strict=True),
            *zip(layer.outputs, layer.grads_in, strict=True),
        )
    ]
    shape = {name: state.graph.node(name).meta["specs"][0].shape for name in (*values, *used)}
    found: dict[str, str] = {}
    for name, gradient in (*pairs, *((name, gradient) for gradient in sorted(used) for name in values)):
        fits = name in values and gradient in used and shape[name] == shape[gradient]
        if fits and name not in found and gradient not in found.values():
            found[name] = gradient
    if left := sorted(used - set(found.values())):
        raise LegalityError(
            f"cut: before layer {split} more gradients go back than values come ({', '.join(left)}); "
            "capture must add them in the later stage"
        )
    return found


def check_cut(state: State) -> None:
    """Every operand of the stage's nodes is made in it, enters by its boundary, or is a placeholder or side node."""
    pieces, graph = state.pieces, state.graph
    own = {n for i in pieces.layers for n in graph.layers[i].forward + graph.layers[i].backward}
    inside = own | {c.value for c in pieces.activations} | {c.gradient for c in pieces.outputs}
    entering = {n for i in pieces.layers for n in graph.layers[i].inputs}
    held = {graph.param(p.name).placeholder for p in pieces.params}
    held |= {b.placeholder for b in graph.buffers} | {i.placeholder for i in graph.inputs}
    for node in state.joint.nodes:
        if node.name not in own or node.op != "call_function":
            continue
        for operand in node.all_input_nodes:
            if operand.op == "placeholder":
                legal = operand.name in held or operand.name in inside
            else:
                legal = is_side(operand) or operand.name in inside
            if not legal:
                hint = (
                    "it is an input of its layer" if operand.name in entering else "no layer of the stage declares it"
                )
                raise LegalityError(
                    f"cut: {node.name} needs {operand.name}, which does not reach stage {state.stage}; {hint}"
                )
