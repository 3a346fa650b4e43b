"""From a captured layer to a ``LayerProblem``: which nodes are ops, what they read, and what each partition takes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from autoplan.capture.graph import Graph, Layer, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import collective_time_us
from autoplan.cost_models.mesh import GroupShape
from autoplan.search.layer_problem import LayerProblem, Op, Param, Phase, Sink, Source, Value
from autoplan.search.pricing import GraphPrices, Job, is_view, output_specs, times_us
from autoplan.sharding.placement import P, Placement
from autoplan.sharding.refinement import Refinement
from autoplan.sharding.registry import tensor_operands
from autoplan.sharding.rule import Choice

__all__ = ["layer_nodes", "layer_problem"]

Cell = tuple[str, int]


def layer_nodes(graph: Graph, layer: Layer) -> list[fx.Node]:
    """The layer's nodes that are ops of its problem, forward before backward: all but those that return integers."""
    nodes = (graph.node(name) for name in (*layer.forward, *layer.backward))
    return [node for node in nodes if is_op(node)]


def is_op(node: fx.Node) -> bool:
    return "expr" not in node.meta and bool(node.meta.get("specs"))


def layer_problem(
    prices: GraphPrices,
    refinement: Refinement,
    layer: Layer,
    sizes: Sizes,
    *,
    cluster: Cluster,
    group: GroupShape,
    precision: str,
    boundary: Sequence[Placement],
    boundary_options: Sequence[Sequence[Placement]] | None = None,
    params: Mapping[str, Placement] | None = None,
    choices: Mapping[str, str] | None = None,
) -> LayerProblem:
    """The problem of one layer on an axis of ``group.size`` ranks.

    ``boundary`` places ``layer.inputs + layer.outputs``, and their gradients; problems that share
    ``boundary_options``, of which it is one each, share their rows. ``params`` fixes the placement of some parameters
    (those that another layer ties), ``choices`` the partition of some nodes.
    """
    reader = _Reader(prices, layer, sizes)
    slots = tuple(map(tuple, boundary_options or [(placement,) for placement in boundary]))
    reader.read_boundary()
    problem_params = reader.read_params(refinement, group.size, params or {})
    picked = {
        node.name: reader.possible(node, _fixed(refinement.choices(node, sizes, group.size), choices or {}, node.name))
        for node in reader.nodes
    }
    return LayerProblem(
        ops=reader.read_ops(picked, cluster, group, precision),
        values=tuple(reader.values),
        params=problem_params,
        sinks=reader.read_sinks(),
        slots=slots,
        at=tuple(options.index(placement) for options, placement in zip(slots, boundary, strict=True)),
        degree=group.size,
        group=group,
        cluster=cluster,
        precision=precision,
    )


def _fixed(choices: tuple[Choice, ...], names: Mapping[str, str], node: str) -> tuple[Choice, ...]:
    name = names.get(node)
    if name is None:
        return choices
    found = tuple(choice for choice in choices if choice.name == name)
    if not found:
        raise ValueError(f"{node} has no partition {name!r}; it has {', '.join(c.name for c in choices)}")
    return found


class _Reader:
    def __init__(self, prices: GraphPrices, layer: Layer, sizes: Sizes) -> None:
        self.graph, self.layer = prices.graph, layer
        self.prices = prices.at(sizes)
        self.nodes = layer_nodes(self.graph, layer)
        self.values: list[Value] = []
        self.cells: dict[Cell, int] = {}
        self.forward = set(layer.forward)
        self.own = {node.name for node in self.nodes}
        self.weight_only = self._weight_only()
        self.again = self._run_again()

    # --- values

    def add(self, cell: Cell, source: Source, owner: int = -1, *, phase: Phase) -> int:
        price = self.prices[cell[0]]
        inside = source == "op" and cell[0] not in self.weight_only
        self.cells[cell] = len(self.values)
        self.values.append(
            Value(
                name=cell[0],
                index=cell[1],
                shape=price.shapes[cell[1]],
                itemsize=price.itemsizes[cell[1]],
                source=source,
                owner=owner,
                phase=phase,
                kept=phase == "forward" and (inside or source == "fixed"),
            )
        )
        return self.cells[cell]

    def read_boundary(self) -> None:
        for slot, name in enumerate(self.layer.inputs):
            self.add((name, 0), "fixed", slot, phase="forward")
        for slot, name in enumerate(self.layer.grads_in, len(self.layer.inputs)):
            if name:
                self.add((name, 0), "fixed", slot, phase="backward")

    def read_params(self, refinement: Refinement, degree: int, fixed: Mapping[str, Placement]) -> tuple[Param, ...]:
        found = []
        layers_of: dict[str, int] = {}
        for layer in self.graph.layers:
            for name in layer.params:
                layers_of[name] = layers_of.get(name, 0) + 1
        sizes = Sizes(batch=1)  # a parameter's shape holds no symbol
        for index, name in enumerate(self.layer.params):
            info = self.graph.param(name)
            node = self.graph.node(info.placeholder)
            self.add((info.placeholder, 0), "param", index, phase="forward")
            placements = (fixed[name],) if name in fixed else refinement.placements(node, sizes, degree)
            found.append(
                Param(
                    name=name,
                    shape=info.shape,
                    itemsize=info.dtype.itemsize,
                    trainable=info.trainable,
                    tied=layers_of[name] > 1,
                    placements=placements,
                )
            )
        return tuple(found)

    def operand_cells(self, node: fx.Node) -> list[Cell]:
        if node.target is operator.getitem:
            producer, index = node.args
            assert isinstance(producer, fx.Node)
            assert isinstance(index, int)
            return [(producer.name, index)]
        return [(operand.name, 0) for operand in tensor_operands(node)]

    def value(self, cell: Cell) -> int:
        """The value at a cell; whatever no layer made is whole on every rank."""
        if cell not in self.cells:
            node = self.graph.node(cell[0])
            made_by = node.meta.get("layer")
            assert made_by is None or node.op == "placeholder", (
                f"{cell[0]}, made in layer {made_by}, is used in layer {self.layer.index} but is not on its boundary"
            )
            self.add(cell, "free", phase="forward")
        return self.cells[cell]

    def possible(self, node: fx.Node, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Without those that want a Partial of a value that no op of the layer makes."""
        made = [cell[0] in self.own for cell in self.operand_cells(node)]
        return tuple(c for c in choices if all(m or p != P for m, p in zip(made, c.operands, strict=True)))

    # --- ops on weights alone

    def _weight_only(self) -> set[str]:
        params = {self.graph.param(name).placeholder for name in self.layer.params}
        found: set[str] = set()
        for node in self.nodes:
            operands = {cell[0] for cell in self.operand_cells(node)}
            if node.name in self.forward and operands and operands <= (params | found):
                found.add(node.name)
        return found

    def _run_again(self) -> set[str]:
        """Of those, the ones that backward needs."""
        used = {c[0] for node in self.nodes if node.name not in self.forward for c in self.operand_cells(node)}
        again: set[str] = set()
        for node in reversed(self.nodes):
            if node.name in self.weight_only and node.name in used:
                again.add(node.name)
                used.update(cell[0] for cell in self.operand_cells(node))
        return again

    # --- ops and ends

    def read_ops(
        self, picked: Mapping[str, tuple[Choice, ...]], cluster: Cluster, group: GroupShape, precision: str
    ) -> tuple[Op, ...]:
        jobs: list[Job] = [
            (self.prices[node.name], choice.operands, choice.results, choice.sharded)
            for node in self.nodes
            for choice in picked[node.name]
        ]
        times = iter(times_us(jobs, cluster.device, precision, group.size).tolist())
        ops: list[Op] = []
        for index, node in enumerate(self.nodes):
            operands = tuple(self.value(cell) for cell in self.operand_cells(node))
            phase: Phase = "forward" if node.name in self.forward else "backward"
            results = tuple(self.add((node.name, i), "op", index, phase=phase) for i in range(len(output_specs(node))))
            phases: tuple[Phase, ...] = ("forward", "backward") if node.name in self.again else (phase,)
            options = picked[node.name]
            ops.append(
                Op(
                    name=node.name,
                    phases=phases,
                    view=is_view(node) and bool(operands),
                    follows=node.target is operator.getitem,
                    operands=operands,
                    results=results,
                    choices=options,
                    time_us=tuple(next(times) for _ in options),
                    inner_us=tuple(
                        sum(float(collective_time_us(i.kind, i.size_bytes, group, cluster)) for i in c.internal)
                        for c in options
                    ),
                )
            )
        return tuple(ops)

    def read_sinks(self) -> tuple[Sink, ...]:
        sinks = []
        for slot, name in enumerate(self.layer.outputs, len(self.layer.inputs)):
            sinks.append(Sink(value=self.value((name, 0)), phase="forward", slot=slot))
        whole = [buffer.mutated_by for buffer in self.graph.buffers if buffer.mutated_by in self.forward]
        if self.graph.loss in self.forward and self.graph.loss not in self.layer.outputs:
            whole.append(self.graph.loss)
        sinks += [Sink(value=self.value((name, 0)), phase="forward") for name in whole if name]
        for slot, name in enumerate(self.layer.grads_out):
            if name:
                sinks.append(Sink(value=self.value((name, 0)), phase="backward", slot=slot))
        own = {node.name for node in self.nodes if node.name not in self.forward}
        for index, param in enumerate(self.layer.params):
            for name in self.graph.gradients.get(param, ()):
                if name in own:
                    sinks.append(Sink(value=self.value((name, 0)), phase="backward", param=index))
        return tuple(sinks)
