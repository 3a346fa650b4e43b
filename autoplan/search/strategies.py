"""The strategy table of a layer class: a Pareto set of its partitions over the tensor axis, priced.

Kinds, by what crosses the layer's boundary: ``replicated`` (every op whole on every rank), ``batch`` (rows sharded),
``tensor`` (whole), ``tensor+sequence`` (tokens sharded). How the ops inside are partitioned is not part of the kind:
the inner program finds it. Each kind is solved at several rates of exchange between time and memory, from "memory is
free" to "a layer's memory is worth its time"; a layer that ties parameters to layers of other classes, for each
placement of those too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from autoplan.capture.graph import BATCH, SEQ, Graph, Layer, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.mesh import GroupShape, Mesh
from autoplan.plans import PrecisionName, Strategy
from autoplan.search.layer_graph import is_op, layer_nodes, layer_problem
from autoplan.search.layer_problem import Assignment, LayerCost, LayerProblem, Weights, evaluate, moves_by_name
from autoplan.search.layer_program import LayerSolution, NoAssignment, solve_layer
from autoplan.search.liveness import transients
from autoplan.search.pricing import GraphPrices
from autoplan.search.solver import Backend
from autoplan.search.table import ParamUse, StrategyCost
from autoplan.sharding.placement import Placement, R, S
from autoplan.sharding.refinement import Refinement, refine

__all__ = ["KINDS", "StrategyTables", "strategy_table"]

Boundary = tuple[tuple[Placement, ...], tuple[Placement, ...]]  # of layer.inputs and of layer.outputs

KINDS = ("replicated", "batch", "tensor", "tensor+sequence")

# Saving all of the memory that the fastest partition takes is worth this many times its time. 0 still prefers less
# memory among equals; at 1 nearly everything is sharded that can be. A rate between them (0.2) took half as much time
# again for Llama-3-8B on 64 devices and was in no plan chosen.
RATES = (0.0, 1.0)
_AMONG_EQUALS = 1e-5
MOST_TIED = 9  # placements of a layer's tied parameters together, as of two matrices: each is several programs


@dataclass(frozen=True, kw_only=True)
class StrategyTables:
    """Strategy tables of one graph on one cluster. ``table`` is cached; what sizes have in common is built once."""

    graph: Graph
    cluster: Cluster
    precision: PrecisionName
    prices: GraphPrices
    micro_batches: int = 8  # over which a gradient that is summed once a step is spread
    backend: Backend = "highs"
    time_limit_s: float = 10.0
    rates: tuple[float, ...] = RATES
    _refinements: dict[str, Refinement] = field(init=False, repr=False, compare=False, default_factory=dict)
    _templates: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    _tables: dict[Any, tuple[StrategyCost, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @staticmethod
    def of(graph: Graph, cluster: Cluster, precision: PrecisionName, **options: Any) -> StrategyTables:
        return StrategyTables(graph=graph, cluster=cluster, precision=precision, prices=GraphPrices(graph), **options)

    def table(self, class_id: str, mesh: Mesh, sizes: Sizes) -> tuple[StrategyCost, ...]:
        """The class's strategies for one micro-batch of ``sizes`` on one data rank."""
        group = mesh.group_shape("tensor", self.cluster)
        key = (class_id, group, sizes)
        if key not in self._tables:
            self._tables[key] = self._build(self.layer(class_id), group, sizes)
        return self._tables[key]

    def relaxed(self, class_id: str, mesh: Mesh, sizes: Sizes) -> tuple[StrategyCost, ...]:
        """One row that no strategy of ``table`` beats in anything; without solving a program.

        All work and all bytes divided by the tensor degree, and nothing communicated.
        """
        alone = Mesh(pipe=mesh.pipe, data=mesh.data, tensor=1)
        (whole,) = self.table(class_id, alone, sizes)
        return (_divided(whole, mesh.tensor),)

    def layer(self, class_id: str) -> Layer:
        """The layer that stands for its class."""
        return next(layer for layer in self.graph.layers if layer.class_id == class_id)

    def refinement(self, layer: Layer) -> Refinement:
        """Over the layer's own nodes, as the rewrite does, so that a choice has one name."""
        if layer.class_id not in self._refinements:
            self._refinements[layer.class_id] = refine(layer_nodes(self.graph, layer))
        return self._refinements[layer.class_id]

    def problem(
        self,
        layer: Layer,
        group: GroupShape,
        sizes: Sizes,
        boundary: Boundary,
        params: Mapping[str, Placement] | None = None,
        choices: Mapping[str, str] | None = None,
        options: Sequence[Boundary] = (),
    ) -> LayerProblem:
        """The layer's problem with that boundary; ``options`` are the boundaries it is to share its rows with."""
        each = [(*inputs, *outputs) for inputs, outputs in (boundary, *options)]
        return layer_problem(
            self.prices,
            self.refinement(layer),
            layer,
            sizes,
            cluster=self.cluster,
            group=group,
            precision=self.precision,
            boundary=each[0],
            boundary_options=[sorted(set(found)) for found in zip(*each, strict=True)],
            params=params,
            choices=choices,
        )

    def price(self, strategy: Strategy, mesh: Mesh, sizes: Sizes) -> StrategyCost:
        """The price of a strategy somebody else chose. Raises ValueError if it is not legal at these sizes."""
        layer = self.layer(strategy.class_id)
        group = mesh.group_shape("tensor", self.cluster)
        names = (*layer.forward, *layer.backward)
        boundary = (
            tuple(map(Placement.parse, strategy.boundary_in)),
            tuple(map(Placement.parse, strategy.boundary_out)),
        )
        problem = self.problem(
            layer,
            group,
            sizes,
            boundary,
            params=dict(zip(layer.params, map(Placement.parse, strategy.params), strict=True)),
            choices=dict(zip(names, strategy.choices, strict=True)),
        )
        assignment = Assignment(ops=(0,) * len(problem.ops), params=(0,) * len(problem.params))
        cost = evaluate(problem, assignment)
        if cost is None:
            raise ValueError(f"strategy {strategy.key} wants a value in a placement that it cannot be brought to")
        return _row(layer, problem, sizes, assignment, cost, strategy, optimal=False)

    def _build(self, layer: Layer, group: GroupShape, sizes: Sizes) -> tuple[StrategyCost, ...]:
        rows = [self._replicated(layer, group, sizes)]
        if group.size > 1:
            kinds = dict(boundaries(self.graph, layer, sizes, group.size))
            for kind in kinds:
                found: list[StrategyCost] = []
                for tied in self._tied(layer, group.size):
                    for cost in self._variants(layer, group, sizes, kind, kinds, tied):
                        if not any(_dominates(other, cost) for other in found):
                            found = [other for other in found if not _dominates(cost, other)] + [cost]
                rows += [_renamed(cost, kind, n) for n, cost in enumerate(found)]
        return tuple(rows)

    def _replicated(self, layer: Layer, group: GroupShape, sizes: Sizes) -> StrategyCost:
        boundary = (R,) * len(layer.inputs), (R,) * len(layer.outputs)
        everything = dict.fromkeys(layer.params, R)
        whole = {node.name: "*" for node in layer_nodes(self.graph, layer)}
        problem = self.problem(layer, group, sizes, boundary, everything, whole)
        assignment = Assignment(ops=(0,) * len(problem.ops), params=(0,) * len(problem.params))
        cost = evaluate(problem, assignment)
        assert cost is not None, "replicating everything needs no move"
        strategy = self._strategy(layer, problem, assignment, "replicated", boundary)
        return _row(layer, problem, sizes, assignment, cost, strategy, optimal=True)

    def _tied(self, layer: Layer, degree: int) -> Iterator[dict[str, Placement]]:
        """Every placement of the parameters that other classes use too; one empty dict where there are none.

        Layers of one class that use a parameter alike agree by having the same strategy. Where so many are tied that
        their placements would be more than ``MOST_TIED``, the largest are tried, and the small ones held whole.
        """
        options: dict[str, list[Placement]] = {}
        for name in layer.params:
            users = [other for other in self.graph.layers if name in other.params]
            if len({(user.class_id, user.params.index(name)) for user in users}) == 1:
                continue
            # Every layer that ties it must be able to hold it so.
            node = self.graph.node(self.graph.param(name).placeholder)
            shared = [set(self.refinement(user).placements(node, Sizes(batch=1), degree)) for user in users]
            options[name] = sorted(set.intersection(*shared))
        count = 1
        for name in sorted(options, key=lambda name: (-self._numel(name), name)):  # alike for all that tie them
            if count * len(options[name]) > MOST_TIED:
                options[name] = [R]
            count *= len(options[name])
        for placements in itertools.product(*options.values()):
            yield dict(zip(options, placements, strict=True))

    def _numel(self, name: str) -> int:
        return math.prod(int(size) for size in self.graph.param(name).shape)

    def _variants(
        self,
        layer: Layer,
        group: GroupShape,
        sizes: Sizes,
        kind: str,
        kinds: Mapping[str, Boundary],
        tied: Mapping[str, Placement],
    ) -> Iterator[StrategyCost]:
        boundary = kinds[kind]
        problem = self.problem(layer, group, sizes, boundary, tied, options=tuple(kinds.values()))
        time_us = sum(min(op.time_us) for op in problem.ops)  # a first guess, good enough to decide among equals
        saved = max(sum(value.size_bytes for value in problem.values), 1)
        params = max(sum(param.local_bytes(R, 1) for param in problem.params), 1)
        best: LayerSolution | None = None
        for rate in self.rates:
            exchange = time_us * max(rate, _AMONG_EQUALS)
            weights = Weights(saved=exchange / saved, params=exchange / params, micro_batches=self.micro_batches)
            try:
                best = solve_layer(
                    problem,
                    weights,
                    self.backend,
                    time_limit_s=self.time_limit_s,
                    hint=None if best is None else best.assignment,
                    templates=self._templates,
                )
            except NoAssignment:
                return
            if rate == self.rates[0]:
                time_us = best.cost.forward_us + best.cost.backward_us
                saved, params = max(best.cost.saved_bytes, 1), max(best.cost.param_bytes, 1)
            strategy = self._strategy(layer, problem, best.assignment, kind, boundary)
            yield _row(layer, problem, sizes, best.assignment, best.cost, strategy, optimal=best.optimal)

    def _strategy(
        self,
        layer: Layer,
        problem: LayerProblem,
        assignment: Assignment,
        kind: str,
        boundary: Boundary,
    ) -> Strategy:
        names = (*layer.forward, *layer.backward)
        choice = {op.name: op.choices[c].name for op, c in zip(problem.ops, assignment.ops, strict=True)}
        assert all(name in choice or not is_op(self.graph.node(name)) for name in names), "an op without a choice"
        return Strategy(
            key=f"{layer.class_id}/{kind}",
            class_id=layer.class_id,
            kind=kind,
            choices=tuple(choice.get(name, "*") for name in names),
            params=tuple(str(p.placements[c]) for p, c in zip(problem.params, assignment.params, strict=True)),
            boundary_in=tuple(map(str, boundary[0])),
            boundary_out=tuple(map(str, boundary[1])),
        )


def strategy_table(
    graph: Graph,
    class_id: str,
    cluster: Cluster,
    mesh: Mesh,
    sizes: Sizes,
    precision: PrecisionName,
    *,
    tables: StrategyTables | None = None,
) -> tuple[StrategyCost, ...]:
    """The strategies of one class on ``mesh.tensor`` ranks. Give ``tables`` to share work between calls."""
    if tables is None:
        tables = StrategyTables.of(graph, cluster, precision)
    return tables.table(class_id, mesh, sizes)


def boundaries(graph: Graph, layer: Layer, sizes: Sizes, degree: int) -> Iterator[tuple[str, Boundary]]:
    """The kinds whose boundary placement the layer's boundary values allow, with that placement."""
    for kind in KINDS[1:]:
        found = [
            tuple(_boundary_placement(graph, name, kind, sizes, degree) for name in names)
            for names in (layer.inputs, layer.outputs)
        ]
        if kind == "tensor" or any(placement != R for side in found for placement in side):
            yield kind, (found[0], found[1])


def _boundary_placement(graph: Graph, name: str, kind: str, sizes: Sizes, degree: int) -> Placement:
    """Shard of the dim that holds rows (or tokens); R where no dim does, or the degree does not divide it."""
    shape = graph.node(name).meta["specs"][0].shape
    if kind == "tensor" or not shape:
        return R
    symbol = BATCH if kind == "batch" else SEQ
    for dim, size in enumerate(shape):
        if size == symbol:
            return S(dim) if sizes.value(size) % degree == 0 else R
        if size == BATCH * SEQ and sizes.value(symbol) % degree == 0:  # tokens of all rows in one dim, rows outermost
            return S(dim) if symbol == BATCH else S(dim, sizes.batch)
    # Without a symbol for tokens, dim 1 is taken for them: patches of an image, channels of a convolution.
    if kind != "batch" and len(shape) > 2 and shape[1].is_Integer and int(shape[1]) % degree == 0:
        return S(1)
    return R


def _row(
    layer: Layer,
    problem: LayerProblem,
    sizes: Sizes,
    assignment: Assignment,
    cost: LayerCost,
    strategy: Strategy,
    *,
    optimal: bool,
) -> StrategyCost:
    peaks = transients(problem, assignment)
    by_cell = {(value.name, value.index): value for value in problem.values}

    def boundary_bytes(names: Sequence[str], placements: Sequence[str]) -> int:
        return sum(
            by_cell[name, 0].local_bytes(Placement.parse(placement), problem.degree)
            for name, placement in zip(names, placements, strict=True)
        )

    params = []
    for param, c, deferred in zip(problem.params, assignment.params, cost.deferred, strict=True):
        placement = param.placements[c]
        local = placement.local_shape(param.shape, problem.degree)
        params.append(
            ParamUse(
                name=param.name,
                local_numel=param.local_bytes(placement, problem.degree) // param.itemsize,
                dim0=local[0] if local else 1,
                trainable=param.trainable,
                deferred=deferred,
                tied=param.tied,
            )
        )
    return StrategyCost(
        strategy=strategy,
        sizes=sizes,
        tensor_degree=problem.degree,
        forward_us=cost.forward_us,
        backward_us=cost.backward_us,
        forward_comm_us=cost.forward_comm_us,
        backward_comm_us=cost.backward_comm_us,
        saved_bytes=cost.saved_bytes,
        boundary_bytes=boundary_bytes(layer.inputs, strategy.boundary_in),
        transient_forward_bytes=peaks.forward_bytes,
        transient_backward_bytes=peaks.backward_bytes,
        transient_recompute_bytes=peaks.recompute_bytes,
        output_bytes=boundary_bytes(layer.outputs, strategy.boundary_out),
        params=tuple(params),
        optimal=optimal,
        redistributions=moves_by_name(problem, assignment, cost),
    )


def _divided(row: StrategyCost, degree: int) -> StrategyCost:
    """``row``'s price if everything in it were cut ``degree`` times at no cost."""
    if degree == 1:
        return row
    return replace(
        row,
        tensor_degree=degree,
        forward_us=row.forward_us / degree,
        backward_us=row.backward_us / degree,
        forward_comm_us=0.0,
        backward_comm_us=0.0,
        saved_bytes=row.saved_bytes // degree,
        boundary_bytes=row.boundary_bytes // degree,
        # A working set may shrink more than it is cut, since what is saved in another placement leaves it. But where
        # forward was recomputed, all that backward needs is there at once.
        transient_forward_bytes=0,
        transient_backward_bytes=0,
        transient_recompute_bytes=max(0, row.saved_bytes - row.boundary_bytes) // degree,
        output_bytes=row.output_bytes // degree,
        params=tuple(replace(use, local_numel=use.local_numel // degree, deferred=False) for use in row.params),
        redistributions=(),
    )


def _dominates(left: StrategyCost, right: StrategyCost) -> bool:
    """``left`` is nowhere worse, and may stand wherever ``right`` may."""
    tied = [
        [(use.name, placement) for placement, use in zip(row.strategy.params, row.params, strict=True) if use.tied]
        for row in (left, right)
    ]
    if tied[0] != tied[1]:
        return False
    return all(a <= b * (1 + 1e-9) for a, b in zip(_figures(left), _figures(right), strict=True))


def _figures(row: StrategyCost) -> tuple[float, ...]:
    return (
        row.forward_us,
        row.backward_us,
        float(row.saved_bytes),
        float(row.transient_forward_bytes),
        float(row.transient_backward_bytes),
        float(row.transient_recompute_bytes),
        float(sum(use.local_numel for use in row.params)),
        float(sum(use.local_numel for use in row.params if use.deferred)),
    )


def _renamed(row: StrategyCost, kind: str, number: int) -> StrategyCost:
    name = kind if number == 0 else f"{kind}.{number}"
    strategy = msgspec.structs.replace(row.strategy, key=f"{row.strategy.class_id}/{name}", kind=name)
    return replace(row, strategy=strategy)
