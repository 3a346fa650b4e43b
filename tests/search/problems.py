"""Small random layer problems, as plain data: what the inner program is checked on."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.mesh import GroupShape
from autoplan.search.layer_problem import (
    Assignment,
    LayerProblem,
    Op,
    Param,
    Phase,
    Sink,
    Value,
    Weights,
    evaluate,
)
from autoplan.sharding.placement import P, Placement, R, S
from autoplan.sharding.rule import Choice

CLUSTER = Cluster.parse("1x8xh100-sxm")
DEGREE = 4
SHAPE = (1024, 4096)


def random_problem(seed: int, forward: int = 3, backward: int = 3) -> LayerProblem:
    """A few ops in random wiring: views, two results, weight ops, values saved, a side value, one parameter."""
    rng = random.Random(seed)
    values = [
        Value(name="x", index=0, shape=SHAPE, itemsize=2, source="fixed", owner=0, kept=True),
        Value(name="side", index=0, shape=SHAPE, itemsize=2, source="free"),
        Value(name="w", index=0, shape=SHAPE, itemsize=2, source="param", owner=0),
    ]
    weight_values = {2}
    ops: list[Op] = []
    for j in range(forward + backward):
        phase: Phase = "forward" if j < forward else "backward"
        if j == forward:
            values.append(Value(name="g", index=0, shape=SHAPE, itemsize=2, source="fixed", owner=1, phase="backward"))
        operands = tuple(rng.choice(range(len(values))) for _ in range(rng.choice([1, 1, 2])))
        if j in (0, forward):  # something of the phase itself
            operands = (0 if j == 0 else len(values) - 1, *operands[1:])
        weights_only = phase == "forward" and set(operands) <= weight_values
        results = tuple(range(len(values), len(values) + rng.choice([1, 1, 1, 2])))
        for i, r in enumerate(results):
            values.append(
                Value(
                    name=f"op{j}", index=i, shape=SHAPE, itemsize=2, source="op", owner=j, phase=phase,
                    kept=phase == "forward" and not weights_only,
                )
            )  # fmt: skip
            if weights_only:
                weight_values.add(r)
        ops.append(_random_op(rng, j, phase, operands, results, weights_only))
    ops = _run_again(ops, values)
    last = max(i for i, v in enumerate(values) if v.phase == "forward" and v.source == "op")
    sinks = [
        Sink(value=last, phase="forward", slot=1),
        Sink(value=len(values) - 1, phase="backward", param=0),
    ]
    if rng.random() < 0.5 and ops[-1].operands[0] > last:
        sinks.append(Sink(value=ops[-1].operands[0], phase="backward", slot=0))
    return LayerProblem(
        ops=tuple(ops),
        values=tuple(values),
        params=(Param(name="w", shape=SHAPE, itemsize=2, trainable=True, tied=False, placements=(R, S(0), S(1))),),
        sinks=tuple(sinks),
        slots=((R, S(0)), (S(0), R, S(1))),
        at=(rng.randrange(2), rng.randrange(3)),
        degree=DEGREE,
        group=GroupShape(size=DEGREE, per_node=DEGREE),
        cluster=CLUSTER,
        precision="bf16",
    )


def _random_op(
    rng: random.Random, j: int, phase: Phase, operands: tuple[int, ...], results: tuple[int, ...], weights_only: bool
) -> Op:
    view = len(operands) == 1 and rng.random() < 0.4
    count = rng.choice([2, 3])
    choices = [Choice(name="*", operands=(R,) * len(operands), results=(R,) * len(results), sharded=False)]
    made: list[Placement] = [R, S(0), S(1)] if weights_only or view else [R, S(0), S(1), P]
    wanted: list[Placement] = [R, S(0), S(1)] if weights_only else [R, S(0), S(1), S(0), S(1), P]
    while len(choices) < count:
        want = tuple(rng.choice(wanted) for _ in operands)
        if len(set(operands)) < len(operands):
            want = (want[0],) * len(operands)
        if view:
            made_in = (P,) * len(results) if want[0] == P else tuple(rng.choice(made) for _ in results)
        else:
            made_in = tuple(rng.choice(made) for _ in results)
        choices.append(Choice(name=f"c{len(choices)}", operands=want, results=made_in, sharded=True))
    return Op(
        name=f"op{j}",
        phases=(phase,),
        view=view,
        follows=view and rng.random() < 0.2,
        operands=operands,
        results=results,
        choices=tuple(choices),
        time_us=tuple(0.0 if view else rng.uniform(1, 100) for _ in choices),
        inner_us=tuple(rng.choice([0.0, 5.0]) for _ in choices),
    )


def _run_again(ops: list[Op], values: list[Value]) -> list[Op]:
    """Weight ops that backward needs run in both phases."""
    used = {v for op in ops if op.phases[0] == "backward" for v in op.operands}
    done = []
    for op in reversed(ops):
        weights = op.phases == ("forward",) and not values[op.results[0]].kept
        if weights and used & set(op.results):
            used |= set(op.operands)
            fields = {name: getattr(op, name) for name in op.__dataclass_fields__} | {"phases": ("forward", "backward")}
            op = Op(**fields)
        done.append(op)
    return done[::-1]


def assignments(problem: LayerProblem) -> Iterator[Assignment]:
    ops = itertools.product(*(range(len(op.choices)) for op in problem.ops))
    params = list(itertools.product(*(range(len(param.placements)) for param in problem.params)))
    for chosen in ops:
        for stored in params:
            yield Assignment(ops=chosen, params=stored)


def brute_force(problem: LayerProblem, weights: Weights) -> float:
    """The least objective of all assignments; infinite if none is possible."""
    costs = (evaluate(problem, assignment) for assignment in assignments(problem))
    return min((cost.objective(weights) for cost in costs if cost is not None), default=math.inf)
