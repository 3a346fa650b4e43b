"""The program against trying everything, and against the step model, on instances small enough for both."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from autoplan.plans import Proof
from autoplan.search.bound import bounds
from autoplan.search.brute_force import brute_force
from autoplan.search.chain import Crossing, Skip
from autoplan.search.rows import agreements, rows_of, undominated
from autoplan.search.solver import BACKENDS, Backend
from autoplan.search.stage_program import StageProgram
from autoplan.search.step_model import price_layers
from tests.search.synthetic import chain, cluster, random_cost, setting

DEPTHS = ("bbb", "bbbb", "ebbh", "aabb", "abab")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed: int, backend: Backend) -> None:
    rng = random.Random(seed)
    layers = chain(DEPTHS[seed % len(DEPTHS)], size_bytes=rng.randrange(1, 1_000_000))
    if seed % 5 in (2, 4):  # a value that passes over a layer
        value = Crossing(out_index=0, in_index=0, size_bytes=rng.randrange(1, 1_000_000))
        skip = Skip(producer=layers.depth[0], consumer=layers.depth[-1], value=value)
        layers = replace(layers, skips=(skip,), relays=dict.fromkeys(pairwise(layers.depth), value.size_bytes))
    tied = "shared" if seed % 3 == 0 and len(layers.classes) > 1 else ""
    kinds = ("tensor", "tensor+sequence", "batch")
    tables = {
        c: tuple(
            random_cost(rng, c, kind, tied=tied if c in layers.classes[:2] else "")
            for kind in kinds[: rng.randint(1, 2)]
        )
        for c in layers.classes
    }
    at = setting(
        cluster(nodes=2, memory_bytes=rng.randrange(5_000_000, 60_000_000)),
        pipe=rng.randint(1, 3),
        data=2,
        tensor=1 if rng.random() < 0.3 else 2,
        micro_batches=rng.randint(2, 6),
        schedule="1f1b" if seed % 4 else "gpipe",
    )
    agreed = agreements(layers, tables)
    every = rows_of(layers, tables, at, zeros=rng.sample((0, 1, 2, 3), 2), recomputes=("none", "full"))
    few = {c: tuple(rng.sample(rows, min(3, len(rows)))) for c, rows in every.items()}
    expected = brute_force(layers, few, at, agreed)
    limits = bounds(layers, few, at)
    if expected is None and limits.step_us == float("inf"):
        return
    program = StageProgram(layers, {c: undominated(rows, agreed) for c, rows in few.items()}, at, agreed)
    answer = program.solve(backend)
    if expected is None:
        assert not answer.found
        assert answer.status == "infeasible"
        return
    assert answer.status == "optimal"
    assert limits.step_us <= expected[0].step_us * (1 + 1e-9)
    assert answer.objective_us == pytest.approx(expected[0].step_us, rel=1e-6)
    priced = price_layers(answer.rows, answer.cuts, layers, at, Proof(status="priced"))
    assert priced.fits
    assert priced.step_us == pytest.approx(answer.objective_us, rel=1e-6)
