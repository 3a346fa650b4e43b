"""Collective times: laws that hold for every cluster, and figures known from published bandwidth tests."""

from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.catalogue import device_names
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import (
    KINDS,
    _candidates,
    collective_algorithms,
    collective_time_us,
)
from autoplan.cost_models.collective_fit import CollectiveFit
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.mesh import GroupShape
from autoplan.cost_models.steps import RateTable

clusters = st.sampled_from([name for name in device_names() if name != "cpu"]).map(lambda n: Cluster.parse(f"64x8x{n}"))
FITS = (
    *(
        CollectiveFit(
            kind=kind,
            level=level,
            members=members,
            latency_us=40.0 * members,
            gbps=RateTable.constant(2.0 / members),
        )
        for kind in ("all_reduce", "all_gather", "send")
        for level, members in (("intra", 2), ("intra", 4), ("inter", 2))
    ),
    CollectiveFit(  # small messages are slower for each byte than large ones, in another way than a line says
        kind="reduce_scatter",
        level="inter",
        members=4,
        latency_us=9.0,
        gbps=RateTable(steps=((1e4, 0.1), (1e6, 3.0), (1e8, 2.0))),
    ),
)
measured = clusters.map(lambda cluster: replace(cluster, collectives=FITS))
shapes = st.builds(
    lambda per_node, nodes: GroupShape(size=per_node * nodes, per_node=per_node), st.integers(1, 8), st.integers(1, 64)
)
kinds = st.sampled_from([kind for kind in KINDS if kind != "send"])
sizes = st.floats(0, 1e12)


def bus_bandwidth_gbps(kind, size_bytes, group, cluster):
    share = (2 if kind == "all_reduce" else 1) * (group.size - 1) / group.size
    return size_bytes * share / collective_time_us(kind, size_bytes, group, cluster) / 1e3


@given(kinds, sizes, sizes, shapes, clusters | measured)
def test_time_grows_with_size_and_is_finite(kind, one, other, group, cluster):
    small, large = sorted((one, other))
    times = [collective_time_us(kind, size, group, cluster) for size in (small, large)]
    assert 0 <= times[0] <= times[1] < np.inf


@given(kinds, sizes, shapes, clusters)
def test_time_is_the_cheapest_of_all_algorithms(kind, size, group, cluster):
    time = collective_time_us(kind, size, group, cluster)
    if group.size == 1:
        assert time == 0
        return
    launch = cluster.device.collective_launch_us
    every = {name: launch + alpha + beta * size for name, alpha, beta in _candidates(kind, group, cluster)}
    # the lower envelope drops nothing that matters; in particular two levels are never slower than a flat ring
    assert time == pytest.approx(min(every.values()))
    assert time <= every.get("ring", np.inf) * (1 + 1e-12)


@given(sizes, shapes, clusters)
def test_all_reduce_is_reduce_scatter_and_all_gather(size, group, cluster):
    whole = collective_time_us("all_reduce", size, group, cluster)
    parts = sum(collective_time_us(kind, size, group, cluster) for kind in ("reduce_scatter", "all_gather"))
    assert whole <= parts * (1 + 1e-12)
    (alpha, beta), *pair = (
        (best.alpha_us, best.beta_us_per_byte)
        for best in (
            collective_algorithms(k, group, cluster)[-1] for k in ("all_reduce", "reduce_scatter", "all_gather")
        )
    )
    assert beta == pytest.approx(pair[0][1] + pair[1][1])
    if group.size > 1:
        assert alpha + cluster.device.collective_launch_us == pytest.approx(pair[0][0] + pair[1][0])


@given(kinds, st.floats(1e7, 1e12), st.integers(1, 8), clusters)
def test_no_faster_across_nodes_than_inside_one(kind, size, members, cluster):
    # From 10 MB: for a few bytes a tree over nodes has fewer steps than NCCL's chain inside a node.
    # xGMI-like meshes are left out: few members on one node reach fewer lanes than a network card may have
    if cluster.intra.group_bytes_per_us(members) < cluster.inter.bytes_per_us:
        return
    inside = collective_time_us(kind, size, GroupShape(size=members, per_node=members), cluster)
    across = collective_time_us(kind, size, GroupShape(size=members, per_node=1), cluster)
    slow_card = cluster.inter.latency_us >= cluster.intra.latency_us
    assert not slow_card or inside <= across * (1 + 1e-12)


@given(kinds, shapes, clusters)
def test_algorithms_get_slower_to_start_and_faster_per_byte(kind, group, cluster):
    algorithms = collective_algorithms(kind, group, cluster)
    pairs = [(algorithm.alpha_us, -algorithm.beta_us_per_byte) for algorithm in algorithms]
    assert pairs == sorted(pairs)


@given(kinds, shapes, clusters | measured)
def test_arrays_and_expressions_agree_with_numbers(kind, group, cluster):
    sizes = np.array([0.0, 1e3, 1e6, 1e9])
    numbers = [collective_time_us(kind, float(size), group, cluster) for size in sizes]
    assert collective_time_us(kind, sizes, group, cluster) == pytest.approx(numbers)
    symbol = sympy.Symbol("size", positive=True)
    expression = collective_time_us(kind, symbol, group, cluster)
    assert [float(sympy.sympify(expression).subs(symbol, size)) for size in sizes] == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("name", "kind", "group", "low", "high"),
    [
        # nccl-tests on DGX nodes, large messages (GB/s of bus bandwidth)
        ("1x8xh100", "all_reduce", (8, 8), 320, 400),
        ("1x8xa100", "all_reduce", (8, 8), 215, 245),
        ("1x8xv100", "all_reduce", (8, 8), 110, 140),
        ("1x8xa100-pcie", "all_reduce", (8, 8), 15, 28),
        ("1x8xmi300x", "all_reduce", (8, 8), 280, 350),
        ("1x8xh800", "all_gather", (8, 8), 140, 170),
        ("16x8xh100", "all_reduce", (128, 8), 300, 400),
        ("16x8xa100", "all_reduce", (128, 8), 150, 200),
        # one member per node has only its own card
        ("16x8xh100", "all_reduce", (16, 1), 40, 48),
        ("16x8xa100", "all_gather", (16, 1), 20, 24),
    ],
)
def test_bus_bandwidth_is_plausible(name, kind, group, low, high):
    shape = GroupShape(size=group[0], per_node=group[1])
    assert low <= bus_bandwidth_gbps(kind, 8e9, shape, Cluster.parse(name)) <= high


def test_small_messages_cost_latency():
    cluster = Cluster.parse("16x8xh100")
    inside = collective_time_us("all_reduce", 8, GroupShape(size=8, per_node=8), cluster)
    everywhere = collective_time_us("all_reduce", 8, GroupShape.whole(cluster), cluster)
    assert 10 <= inside <= 50  # nccl-tests: about 20-35 us on eight devices
    assert inside < everywhere <= 150
    assert collective_algorithms("all_reduce", GroupShape.whole(cluster), cluster)[0].name == "tree"


def test_send():
    cluster = Cluster.parse("2x8xmi300x")
    inside = collective_time_us("send", 1e9, GroupShape.pair(inter=False), cluster)
    across = collective_time_us("send", 1e9, GroupShape.pair(inter=True), cluster)
    assert inside == pytest.approx(1e9 / (64e3 * 0.7), rel=0.01)  # one xGMI link of the seven
    assert across == pytest.approx(1e9 / (50e3 * 0.9), rel=0.01)


@given(st.sampled_from(FITS), sizes, clusters)
def test_a_measured_group_takes_what_was_measured(fit, size, cluster):
    members, per_node = fit.shape
    group = GroupShape(size=members, per_node=per_node)
    time = collective_time_us(fit.kind, size, group, replace(cluster, collectives=FITS))
    assert time == pytest.approx(fit.latency_us + fit.transfer_us(size))


@given(st.sampled_from(["all_reduce", "all_gather"]), shapes, clusters)
def test_measuring_what_the_model_says_changes_nothing(kind, group, cluster):
    """Other shapes are scaled by how far off the model is, so a model that is right stays as it is."""
    fits = []
    for level, shape in (("intra", GroupShape(size=4, per_node=4)), ("inter", GroupShape(size=16, per_node=8))):
        modelled = collective_algorithms(kind, shape, cluster)
        fits.append(
            CollectiveFit(
                kind=kind,
                level=level,
                members=shape.size,
                per_node=shape.per_node if level == "inter" else 1,
                latency_us=modelled[0].alpha_us,
                gbps=RateTable.constant(1e-3 / modelled[-1].beta_us_per_byte),
            )
        )
    same = replace(cluster, collectives=tuple(fits))
    modelled = collective_algorithms(kind, group, cluster)
    (fitted,) = collective_algorithms(kind, group, same)
    assert fitted.time_us(0.0) == pytest.approx(modelled[0].alpha_us)
    assert fitted.time_us(1e6) - fitted.time_us(0.0) == pytest.approx(1e6 * modelled[-1].beta_us_per_byte)


def test_a_larger_group_is_scaled_from_the_nearest_measured_one():
    cluster = Cluster.parse("4x4xcpu")
    group, twice = GroupShape(size=2, per_node=1), GroupShape(size=4, per_node=1)
    slow = CollectiveFit(kind="all_reduce", level="inter", members=2, latency_us=2000.0, gbps=RateTable.constant(0.01))
    calibrated = replace(cluster, collectives=(slow,))
    small, large = (collective_time_us("all_reduce", 1e9, shape, calibrated) for shape in (group, twice))
    modelled = [collective_time_us("all_reduce", 1e9, shape, cluster) for shape in (group, twice)]
    assert large / small == pytest.approx(modelled[1] / modelled[0], rel=1e-3)
    # the other level and other kinds are not touched
    inside = GroupShape(size=4, per_node=4)
    for kind, shape in (("all_reduce", inside), ("all_gather", group)):
        assert collective_algorithms(kind, shape, calibrated) == collective_algorithms(kind, shape, cluster)


def test_unknown_kind():
    with pytest.raises(ClusterError, match="'all_reduce'"):
        collective_time_us("allreduce", 1, GroupShape.pair(inter=False), Cluster.parse("2xh100"))
