"""Pass 4: the stage's nodes become a forward and a backward graph.

What backward needs of forward is, in this order of preference,

- a placeholder: parameters, buffers and inputs enter both graphs;
- made again in backward: side nodes and what depends on parameters alone (``t(weight)``), which is cheap and would
  otherwise keep a second copy alive; and, in a layer with recompute, every forward node of the layer, right before
  the layer's backward nodes;
- saved: forward returns it. It is saved as its producer placed it. A Partial value is saved as backward's first
  consumer asks for it, so that the sum over ranks is not made twice.

Random nodes are never made again: what they returned is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoplan.capture.graph import Layer
from autoplan.errors import LegalityError
from autoplan.rewrite.program import ParamSpec
from autoplan.rewrite.state import (
    State,
    boundary,
    is_getitem,
    is_random,
    is_side,
    map_operands,
    operands,
    output_of,
    phases,
    placement_of,
    result_of,
    specs_of,
)
from autoplan.sharding.placement import P, Placement, R
from autoplan.sharding.rule import Choice


@dataclass(frozen=True, slots=True)
class Save:
    """A forward value kept for backward, seen from ``layer`` (whose boundary may have moved it), as ``placement``."""

    value: str
    layer: int
    placement: Placement


def split(state: State) -> State:
    """``forward`` and ``backward``, still on whole tensors; ``saved``: how many values pass from one to the other."""
    backward = _Backward(state)
    backward.build()
    forward = _Forward(state)
    forward.build(tuple(backward.saves))
    return replace(
        state,
        forward=forward.graph,
        backward=backward.graph,
        saved=len(backward.saves),
        updates=tuple(b.name for b in forward.updates),
    )


class _Builder:
    """Copies nodes of the joint graph into a new one, where operands are looked up by the layer that asks."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.pieces = state.pieces
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {n.name: n for n in state.joint.nodes}
        self.made: dict[str, fx.Node] = {}  # by captured name: placeholders, side nodes, nodes of the stage
        self.entering: dict[tuple[str, int], fx.Node] = {}  # (value, layer): boundary node at the layer's entrance
        self.leaving: dict[str, fx.Node] = {}  # boundary node at the exit of the layer that made the value
        self.unit = self.pieces.layers[0]
        self.phases = {i: phases(state.graph.layers[i], self.nodes) for i in self.pieces.layers}
        self.forward_nodes = frozenset(n.name for forward, _ in self.phases.values() for n in forward)

    def hold(self) -> None:
        """Placeholders that both graphs begin with: parameters, buffers, inputs."""
        for param in self.pieces.params:
            name = self.state.graph.param(param.name).placeholder
            self.made[name] = self.placeholder(name, param.tensor)
        for name in [b.placeholder for b in self.state.graph.buffers] + [
            i.placeholder for i in self.state.graph.inputs
        ]:
            self.made[name] = self.placeholder(name, R)

    def placeholder(self, name: str, placement: Placement, prefix: str = "") -> fx.Node:
        node = self.graph.create_node("placeholder", prefix + name)
        node.target = node.name  # two crossing values may share a gradient: argument names must still differ
        specs = specs_of(self.nodes[name])[:1]
        node.meta = {"placement": placement, "value": name, "specs": specs, "unit": None, "saved": prefix == "saved_"}
        return node

    def boundary(self, source: fx.Node, placement: Placement, *, between: bool = False) -> fx.Node:
        node = self.graph.call_function(boundary, (source,))
        choice = Choice(name="boundary", operands=(placement,), results=(placement,), sharded=False)
        node.meta = {
            "choice": choice, "value": source.meta["value"], "specs": source.meta["specs"], "unit": self.unit,
            "between": between,
        }  # fmt: skip
        return node

    def copy(self, node: fx.Node, find: Callable[[int, fx.Node], fx.Node]) -> fx.Node:
        """``node`` with operand i replaced by ``find(i, operand)``."""
        args, kwargs = map_operands(node, find)
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        new.meta["unit"] = self.unit
        choice = self.state.choices.get(node.name)
        if not is_getitem(node):
            new.meta["choice"] = self.state.choices[node.name]
        elif choice is not None and choice.operands[0] != placement_of(new):
            return self.boundary(new, choice.operands[0])
        return new

    def side(self, node: fx.Node) -> fx.Node:
        """A side node, made when first asked for."""
        if node.name not in self.made:
            self.made[node.name] = self.copy(node, lambda _, operand: self.shared(operand))
        return self.made[node.name]

    def shared(self, node: fx.Node) -> fx.Node:
        """An operand of a side node: another one, or a placeholder."""
        return self.side(node) if is_side(node) else self.made[node.name]

    def result(self, node: fx.Node) -> Placement:
        return result_of(node, self.state.choices)

    def finish(self, outputs: list[tuple[fx.Node, Placement]], between: int) -> None:
        """``between``: how many of the first outputs cross to another stage."""
        self.graph.output(tuple(node for node, _ in outputs))
        output_of(self.graph).meta = {"operands": tuple(placement for _, placement in outputs), "between": between}
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


class _Forward(_Builder):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        # A count of batches depends on nothing but itself, so no layer makes it: every stage keeps it.
        side = {name for name, node in self.nodes.items() if is_side(node)}
        self.updates = [b for b in state.graph.buffers if b.mutated_by in self.forward_nodes | side]

    def build(self, saves: tuple[Save, ...]) -> None:
        self.hold()
        for crossing in self.pieces.activations:
            self.leaving[crossing.value] = self.placeholder(crossing.value, crossing.placement)
        for i in self.pieces.layers:
            self.layer(self.state.graph.layers[i])
        outputs = [(self.leaving.get(c.value) or self.value(c.value), c.placement) for c in self.pieces.outputs]
        outputs += [(self.seen_from(save.value, save.layer), save.placement) for save in saves]
        outputs += [(self.value(str(b.mutated_by)), R) for b in self.updates]
        self.finish(outputs, 0 if self.state.last else len(self.pieces.outputs))

    def layer(self, layer: Layer) -> None:
        self.unit = layer.index
        strategy = self.state.strategy(layer.index)
        for name, text in zip(layer.inputs, strategy.boundary_in, strict=True):
            self.entering[name, layer.index] = self.boundary(self.leaving[name], Placement.parse(text), between=True)
        for node in self.phases[layer.index][0]:
            self.made[node.name] = self.copy(node, lambda _, operand: self.operand(operand, layer))
        for name, text in zip(layer.outputs, strategy.boundary_out, strict=True):
            self.leaving[name] = self.boundary(self.made[name], Placement.parse(text))

    def operand(self, node: fx.Node, layer: Layer) -> fx.Node:
        if is_side(node):
            return self.side(node)
        if (node.name, layer.index) in self.entering:
            return self.entering[node.name, layer.index]
        if node.name in self.made:
            return self.made[node.name]
        raise LegalityError(
            f"split: a forward node of layer {layer.index} needs {node.name}, not an input of the layer"
        )

    def seen_from(self, value: str, layer: int) -> fx.Node:
        return self.entering.get((value, layer)) or self.value(value)

    def value(self, name: str) -> fx.Node:
        return self.side(self.nodes[name]) if is_side(self.nodes[name]) else self.made[name]


class _Backward(_Builder):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.saves: dict[Save, fx.Node] = {}
        self.again: dict[tuple[str, int], fx.Node] = {}  # forward nodes made again, by layer
        self.random = _random_nodes(state)
        self.totals: dict[str, fx.Node] = {}  # gradient of each parameter, as far as summed
        self.trainable = {p.name: p for p in self.pieces.params if p.trainable}
        self.term_of = {t: name for name in self.trainable for t in state.graph.gradients.get(name, ())}

    def build(self) -> None:
        self.hold()
        start = self.graph.create_node("placeholder", "saves_end_here")  # saved placeholders go before it
        for crossing in self.pieces.outputs:
            if crossing.gradient:
                node = self.placeholder(crossing.gradient, crossing.placement)
                self.leaving[crossing.gradient] = self.made[crossing.gradient] = node
        self.start = start
        for i in reversed(self.pieces.layers):
            self.layer(self.state.graph.layers[i])
        self.finish(self.outputs(), sum(bool(c.gradient) for c in self.pieces.activations))
        self.graph.erase_node(start)

    def layer(self, layer: Layer) -> None:
        self.unit = layer.index
        strategy = self.state.strategy(layer.index)
        for gradient, text in zip(layer.grads_in, strategy.boundary_out, strict=True):
            if gradient and gradient in self.leaving:
                self.entering[gradient, layer.index] = self.boundary(
                    self.leaving[gradient], Placement.parse(text), between=True
                )
        if self.state.plan.layers[layer.index].recompute == "full":
            for node in self.phases[layer.index][0]:
                if node.name not in self.random:
                    self.remake(node, layer)
        for node in self.phases[layer.index][1]:
            self.made[node.name] = self.copy(node, self.finder(node, layer))
        for name in layer.backward:
            if name in self.term_of:
                self.add_term(self.made[name], self.trainable[self.term_of[name]])
        for gradient, text in zip(layer.grads_out, strategy.boundary_in, strict=True):
            if gradient and gradient in self.made:
                self.leaving[gradient] = self.boundary(self.made[gradient], Placement.parse(text))

    def finder(self, consumer: fx.Node, layer: Layer) -> Callable[[int, fx.Node], fx.Node]:
        """What stands for operand i of a node of ``layer`` in backward."""
        if is_getitem(consumer):
            return lambda _, operand: self.operand(operand, layer, R)
        asked = self.state.choices[consumer.name].operands
        return lambda i, operand: self.operand(operand, layer, asked[i])

    def operand(self, node: fx.Node, layer: Layer, asked: Placement) -> fx.Node:
        name = node.name
        if (name, layer.index) in self.entering:
            return self.entering[name, layer.index]
        if is_side(node) and name not in self.random:
            return self.side(node)
        if name in self.made:
            return self.made[name]
        if name not in self.random and self.from_params(node):
            return self.remake(node, layer)
        if (name, layer.index) in self.again:
            return self.again[name, layer.index]
        return self.save(node, layer, asked)

    def from_params(self, node: fx.Node) -> bool:
        """True for a forward node of this stage that depends on parameters alone."""
        if node.name not in self.forward_nodes:
            return False
        params = {self.state.graph.param(p.name).placeholder for p in self.pieces.params}
        sources = operands(node)
        return bool(sources) and all(s.name in params or self.from_params(s) for s in sources)

    def remake(self, node: fx.Node, layer: Layer) -> fx.Node:
        key = (node.name, layer.index)
        if key not in self.again:
            self.again[key] = self.copy(node, self.finder(node, layer))
            self.again[key].meta["again"] = True
        return self.again[key]

    def save(self, node: fx.Node, layer: Layer, asked: Placement) -> fx.Node:
        strategy = self.state.strategy(layer.index)
        if node.name in layer.inputs:
            placement = Placement.parse(strategy.boundary_in[layer.inputs.index(node.name)])
        elif node.name in self.forward_nodes or is_side(node):
            placement = self.result(node)
        else:
            raise LegalityError(
                f"split: backward of layer {layer.index} needs {node.name}, which no value saved can give"
            )
        if placement.kind == "P":
            placement = asked
        save = Save(node.name, layer.index, placement)
        if save not in self.saves:
            with self.graph.inserting_before(self.start):
                self.saves[save] = self.placeholder(node.name, placement, prefix="saved_")
        return self.saves[save]

    def outputs(self) -> list[tuple[fx.Node, Placement]]:
        found: list[tuple[fx.Node, Placement]] = []
        for crossing in self.pieces.activations:
            if crossing.gradient:
                found.append((self.leaving.get(crossing.gradient) or self.made[crossing.gradient], crossing.placement))
        for param in self.trainable.values():
            found.append((self.totals.get(param.name) or self.zeros(param), self.target(param)))
        return found

    def target(self, param: ParamSpec) -> Placement:
        """Where a parameter's gradient ends: as the parameter lies, or Partial until the end of the step."""
        return P if param.deferred else param.tensor

    def add_term(self, term: fx.Node, param: ParamSpec) -> None:
        target = self.target(param)
        moved = self.boundary(term, target)
        total = self.totals.get(param.name)
        if total is None:
            self.totals[param.name] = moved
            return
        self.totals[param.name] = self.graph.call_function(torch.ops.aten.add.Tensor, (total, moved))
        choice = Choice(name="sum", operands=(target, target), results=(target,), sharded=False)
        self.totals[param.name].meta = moved.meta | {"choice": choice, "between": False}

    def zeros(self, param: ParamSpec) -> fx.Node:
        """The gradient of a parameter that backward does not reach in this stage."""
        holder = self.made[self.state.graph.param(param.name).placeholder]
        zeros = self.graph.call_function(torch.ops.aten.zeros_like.default, (holder,))
        target = self.target(param)
        choice = Choice(name="zeros", operands=(param.tensor,), results=(target,), sharded=False)
        zeros.meta = {
            "choice": choice, "value": holder.meta["value"], "specs": holder.meta["specs"], "unit": self.unit,
        }  # fmt: skip
        return zeros


def _random_nodes(state: State) -> frozenset[str]:
    """Nodes that give another value when made again: random ones, picks from them, side nodes that follow from one."""
    found = set(state.graph.extra.get("random", ()))
    for node in state.joint.nodes:
        if node.op != "call_function":
            continue
        follows = is_side(node) or is_getitem(node)
        if is_random(node) or (follows and any(s.name in found for s in node.all_input_nodes)):
            found.add(node.name)
    return frozenset(found)


def check_split(state: State) -> None:
    """Both graphs are well formed, end in what the calling convention says, and agree on what is saved."""
    state.forward.lint()
    state.backward.lint()
    pieces = state.pieces
    outputs = output_of(state.forward)
    count = len(outputs.meta["operands"])
    if count != len(pieces.outputs) + state.saved + len(state.updates):
        raise LegalityError(f"split: {outputs.name} of forward returns {count} values")
    kept = outputs.meta["operands"][len(pieces.outputs) : len(pieces.outputs) + state.saved]
    holders = [n for n in state.backward.nodes if n.op == "placeholder" and n.meta["saved"]]
    for wanted, holder in zip(kept, holders, strict=True):
        if wanted != placement_of(holder):
            raise LegalityError(f"split: {holder.name} is saved {wanted} but read {placement_of(holder)}")
    gradients = [c for c in pieces.activations if c.gradient]
    returned = len(output_of(state.backward).meta["operands"])
    if returned != len(gradients) + sum(p.trainable for p in pieces.params):
        raise LegalityError(f"split: {output_of(state.backward).name} of backward returns {returned} values")
