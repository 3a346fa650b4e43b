"""Cluster descriptions: reading, refusing, round trips, topology."""

import json
import os
import tomllib
from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.catalogue import device, device_names
from autoplan.cost_models.cluster import Cluster, Link
from autoplan.cost_models.collective_fit import CollectiveFit
from autoplan.cost_models.device import Figure
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.steps import EfficiencyTable, RateTable

FULL = """\
nodes = 4
device = "a100-80gb-sxm"
devices_per_node = 8
memory_gb = 76
price_per_hour = 2.1

[intra]
bandwidth_gbps = 250
latency_us = 2

[inter]
bandwidth_gbps = 12.5
latency_us = 9
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_parse():
    cluster = Cluster.parse("4x8xh100-sxm")
    assert (cluster.nodes, cluster.devices_per_node, cluster.size) == (4, 8, 32)
    assert cluster.device is device("h100-sxm")
    assert cluster.memory_bytes == 80e9
    assert (Cluster.parse("8xh100").nodes, Cluster.parse("8xh100").devices_per_node) == (1, 8)
    assert Cluster.parse("tpu-v5p").size == 1
    assert str(cluster) == "4x8xh100-sxm"


@pytest.mark.parametrize("text", ["", "8x8", "8x8x8xh100", "x8xh100", "0x8xh100", "-1xh100", "8x8xh1000-sxm"])
def test_parse_refuses(text):
    with pytest.raises(ClusterError):
        Cluster.parse(text)


def test_toml_file(tmp_path):
    cluster = Cluster.parse(str(write(tmp_path, FULL)))
    assert cluster.name == "mine"
    assert cluster.memory_bytes == 76_000_000_000
    assert cluster.intra == Link(bandwidth_gbps=250, latency_us=2)
    assert cluster.inter.bandwidth_gbps == 12.5
    assert cluster.price_per_hour == 2.1


def test_toml_leaves_the_rest_to_the_device(tmp_path):
    cluster = Cluster.from_toml(write(tmp_path, 'nodes = 2\ndevice = "h100"\n[inter]\nlatency_us = 7\n'))
    shipped = device("h100")
    assert cluster.devices_per_node == 8
    assert cluster.intra == shipped.scale_up
    assert cluster.inter.latency_us == 7
    assert (cluster.inter.bandwidth_gbps, cluster.inter.efficiency) == (50, shipped.scale_out.efficiency)
    # a measured rate is taken as it is
    measured = Cluster.from_toml(write(tmp_path, 'nodes = 2\ndevice = "h100"\n[inter]\nbandwidth_gbps = 44\n'))
    assert measured.inter.efficiency == 1
    assert measured.inter.latency_us == shipped.scale_out.latency_us


def test_toml_device_with_overrides(tmp_path):
    text = 'nodes = 1\n[device]\nbase = "h100"\nname = "ours"\naliases = []\n[device.memory]\nsize_bytes = 94e9\n'
    cluster = Cluster.from_toml(write(tmp_path, text))
    assert cluster.memory_bytes == 94e9
    assert cluster.device.memory_bandwidth_gbps == device("h100").memory_bandwidth_gbps
    memory = next(figure for figure in cluster.device.figures if figure.section == "memory")
    assert memory.source.endswith("changed by the cluster file")
    assert Cluster.from_toml(write(tmp_path, cluster.to_toml())) == cluster
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 4", "nodes = 0", r"mine\.toml:1: field `nodes` must be a whole number of at least 1, not 0"),
        ("nodes = 4", "nodes = 2.5", r"mine\.toml:1: field `nodes`"),
        ("nodes = 4", "", r"field `nodes` is missing"),
        ("memory_gb = 76", "memory_gb = 0", r"mine\.toml:4: field `memory_gb` must be greater than 0"),
        ("memory_gb = 76", "memory_gb = 76\nmemory_bytes = 3", r"keep one"),
        ("memory_gb = 76", "memroy_gb = 76", r"mine\.toml:4: field `memroy_gb` is unknown; did you mean 'memory_gb'"),
        ("bandwidth_gbps = 250", "bandwidth_gbps = 0", r"mine\.toml:8: field `intra\.bandwidth_gbps` must be greater"),
        ("bandwidth_gbps = 250", "bandwidth_gbps = true", r"mine\.toml:8: .* must be a finite number, not True"),
        ("bandwidth_gbps = 250", "bandwidth_gbps = nan", r"mine\.toml:8: .* must be a finite number"),
        (
            "bandwidth_gbps = 12.5",
            "bandwith_gbps = 9",
            r"mine\.toml:12: field `inter\.bandwith_gbps` is unknown; did you",
        ),
        ("latency_us = 9", "latency_us = -1", r"mine\.toml:13: field `inter\.latency_us` must be at least 0"),
        ('"a100-80gb-sxm"', '"a100-80gb-sxn"', r"mine\.toml:2: field `device` is refused.*'a100-80gb-sxm'"),
        ("price_per_hour = 2.1", "price_per_hour = -2.1", r"mine\.toml:5: field `price_per_hour`"),
        ("[intra]", "[intra", r"mine\.toml: not valid TOML: .*line 7"),
    ],
)
def test_toml_refuses(tmp_path, old, new, message):
    assert old in FULL
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(write(tmp_path, FULL.replace(old, new, 1)))


@pytest.mark.parametrize("line", ["intra = 3", 'device = {base = "nope"}', "device = 7"])
def test_toml_refuses_wrong_types(tmp_path, line):
    text = "nodes = 1\n" + (line if line.startswith("device") else f'device = "h100"\n{line}') + "\n"
    with pytest.raises(ClusterError, match=r"mine\.toml:\d: "):
        Cluster.from_toml(write(tmp_path, text))


def test_missing_file(tmp_path):
    with pytest.raises(ClusterError, match="check the path"):
        Cluster.from_toml(tmp_path / "absent.toml")


links = st.builds(
    Link,
    bandwidth_gbps=st.floats(1e-3, 1e4),
    latency_us=st.floats(0, 1e3),
    efficiency=st.floats(0.01, 1),
    pair_bandwidth_gbps=st.none() | st.floats(1e-3, 1e4),
)
clusters = st.builds(
    Cluster,
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip),
    nodes=st.integers(1, 99),
    devices_per_node=st.integers(1, 16),
    device=st.sampled_from(device_names()).map(device),
    intra=links,
    inter=links,
    memory_bytes=st.integers(1, 10**12),
    price_per_hour=st.none() | st.floats(0, 100),
)


def calibrated():
    """A cluster with every constant that calibration can find."""
    cluster = Cluster.parse("2x2xcpu")
    figures = tuple(
        Figure(section=section, source="measured", date="2026-12-01")
        for section in ("matmul_write", "op_rates", "op_gflops", "op_launch", "overlap")
    )
    found = replace(
        cluster.device,
        name="cpu-calibrated",
        aliases=(),
        matmul_write_gbps=(("fp32", 2.2),),
        op_rates=(("_softmax", RateTable.constant(1.25)), ("adamw", RateTable(steps=((1e4, 1.0), (1e6, 3.5))))),
        op_gflops=(("autoplan::attention", RateTable.constant(21.0)), ("bmm.fp32", RateTable.constant(33.0))),
        op_launches_us=(("autoplan::attention", 40.0),),
        comm_slowdown=0.3,
        reserved_bytes=180_000_000,
        matmul_efficiency_of=(("fp32", EfficiencyTable(steps=((1e5, 0.2), (1e8, 0.9)))),),
        figures=cluster.device.figures + figures,
    )
    fits = (
        CollectiveFit(kind="all_reduce", level="intra", members=2, latency_us=90.0, gbps=RateTable.constant(0.8)),
        CollectiveFit(
            kind="all_reduce",
            level="inter",
            members=4,
            per_node=2,
            latency_us=300.0,
            gbps=RateTable(steps=((1e4, 0.01), (1e6, 0.04))),
            source="here",
        ),
    )
    return replace(cluster, device=found, collectives=fits)


def test_measured_constants_round_trip(tmp_path):
    cluster = calibrated()
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert Cluster.from_toml(write(tmp_path, cluster.to_toml())) == cluster
    assert "[[collectives]]" in cluster.to_toml()
    assert '"autoplan::attention" = 21.0' in cluster.to_toml()
    assert "adamw = [[10000.0, 1.0], [1000000.0, 3.5]]" in cluster.to_toml()


@pytest.mark.parametrize(
    "change",
    [
        {"op_rates": (("_softmax", RateTable.constant(1.5)),)},
        {"op_gflops": ()},
        {"op_launches_us": (("autoplan::attention", 41.0),)},
        {"comm_slowdown": 0.0},
        {"reserved_bytes": 0},
        {"matmul_efficiency_of": ()},
        {"matmul_write_gbps": ()},
    ],
)
def test_measured_constants_count_in_the_fingerprint(change):
    cluster = calibrated()
    assert replace(cluster, device=replace(cluster.device, **change)).fingerprint() != cluster.fingerprint()


def test_measured_collectives_count_in_the_fingerprint_and_their_source_does_not():
    cluster = calibrated()
    first, second = cluster.collectives
    assert replace(cluster, collectives=(first,)).fingerprint() != cluster.fingerprint()
    assert (
        replace(cluster, collectives=(first, replace(second, gbps=RateTable.constant(0.05)))).fingerprint()
        != cluster.fingerprint()
    )
    assert replace(cluster, collectives=(first, replace(second, source=""))).fingerprint() == cluster.fingerprint()


MEASURED = """\
nodes = 2
[device]
base = "cpu"
[device.memory]
reserved_bytes = 200_000_000
[device.op_rates]
gelu = 1.5
[device.matmul_efficiency.fp32]
steps = [[1e6, 0.5]]
[device.overlap]
comm_slowdown = 0.25
[[collectives]]
kind = "all_gather"
level = "inter"
members = 2
latency_us = 400
gbps = 0.1
[[collectives]]
kind = "send"
level = "inter"
members = 2
latency_us = 100
gbps = [[1e4, 0.02], [1e6, 0.1]]
"""


def test_a_cluster_file_may_give_measured_constants_alone(tmp_path):
    cluster = Cluster.from_toml(write(tmp_path, MEASURED))
    shipped = device("cpu")
    assert cluster.device.op_rate_table("gelu", "fp32") == RateTable.constant(1.5)
    assert cluster.device.op_rate_table("gelu_backward", "fp32") is None
    assert (cluster.device.comm_slowdown, cluster.device.reserved_bytes) == (0.25, 200_000_000)
    assert cluster.device.memory_bandwidth_gbps == shipped.memory_bandwidth_gbps
    assert cluster.device.matmul_table("fp32").steps == ((1e6, 0.5),)
    assert cluster.device.matmul_table("bf16") == shipped.matmul_efficiency
    assert [fit.kind for fit in cluster.collectives] == ["all_gather", "send"]
    assert Cluster.from_toml(write(tmp_path, cluster.to_toml())) == cluster


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gelu = 1.5", "gelu = 0", r"mine\.toml:7: field `device\.op_rates\.gelu` must be greater than 0"),
        ("= 1.5", "= [[1e6, 2.0], [1e5, 3.0]]", r"mine\.toml:7: field `device\.op_rates\.gelu` is refused: .*growing"),
        ("= 1.5", "= [1.5]", r"mine\.toml:7: field `device\.op_rates\.gelu` must be a list of \[size, rate\] pairs"),
        ("= 0.25", "= -1", r"mine\.toml:11: field `device\.overlap\.comm_slowdown` must be at least 0"),
        ("200_000_000", "1.5", r"mine\.toml:5: field `device\.memory\.reserved_bytes` must be a whole number"),
        ("efficiency.fp32", "efficiency.fp23", r"`device\.matmul_efficiency\.fp23` is unknown; did you mean 'fp32'"),
        ('"send"', '"sned"', r"mine\.toml:19: field `collectives\[1\]\.kind` 'sned' is unknown; did you mean 'send'"),
        ("gbps = 0.1", "gbps = 0", r"mine\.toml:17: field `collectives\[0\]\.gbps` must be greater than 0"),
        ("1e4, 0.02", "1e4, 0.0001", r"mine\.toml:23: field `collectives\[1\]\.gbps` is refused: .*growing"),
        ("latency_us = 100", "latency_us = -1", r"mine\.toml:22: field `collectives\[1\]\.latency_us` must be at"),
        (
            '"inter"',
            '"intra"\nper_node = 2',
            r"mine\.toml:16: field `collectives\[0\]\.members` is refused: .*per_node",
        ),
        ('"send"', '"all_gather"', "collectives has all_gather of 2 members \\(inter\\) twice; keep one"),
        ("[[collectives]]", "[collectives]", "mine.toml: not valid TOML"),
    ],
)
def test_measured_constants_that_are_refused(tmp_path, old, new, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(write(tmp_path, MEASURED.replace(old, new, 1)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "gather"},
        {"level": "rack"},
        {"members": 1},
        {"level": "inter", "per_node": 4},
        {"latency_us": float("nan")},
    ],
)
def test_collective_fit_refuses(fields):
    good = {"kind": "all_reduce", "level": "intra", "members": 4, "latency_us": 1.0, "gbps": RateTable.constant(1.0)}
    CollectiveFit(**good)
    with pytest.raises(ClusterError, match="CollectiveFit"):
        CollectiveFit(**good | fields)


@given(clusters)
def test_dict_and_toml_round_trips(cluster):
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert Cluster.from_dict(tomllib.loads(cluster.to_toml())) == cluster
    assert hash(cluster) == hash(Cluster.from_dict(cluster.to_dict()))


def test_fingerprint_follows_figures_and_not_labels():
    cluster = Cluster.parse("2x8xh100")
    assert len(cluster.fingerprint()) == 16
    assert replace(cluster, name="other", price_per_hour=3.0).fingerprint() == cluster.fingerprint()
    assert replace(cluster, nodes=3).fingerprint() != cluster.fingerprint()
    assert replace(cluster, memory_bytes=79).fingerprint() != cluster.fingerprint()
    faster = replace(cluster.device, kernel_launch_us=1.0)
    assert replace(cluster, device=faster).fingerprint() != cluster.fingerprint()


def test_local():
    cluster = Cluster.local()
    assert cluster.size == os.cpu_count()
    assert cluster.device.name == "cpu"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < cluster.memory_bytes <= total // cluster.size  # less inside a container with a limit
    assert Cluster.local(devices=4, memory_bytes=10**9).memory_bytes == 10**9
    assert Cluster.local(devices=2, kind="h100-sxm").device.backend == "cuda"
    with pytest.raises(ClusterError, match="devices"):
        Cluster.local(devices=0)


def test_topology():
    cluster = Cluster.parse("3x4xa100")
    graph = cluster.topology()
    devices = [vertex for vertex, kind in graph.nodes(data="kind") if kind == "device"]
    assert len(devices) == cluster.size
    assert networkx.is_tree(graph)
    ranks = sorted(graph.nodes[vertex]["rank"] for vertex in devices)
    assert ranks == list(range(cluster.size))
    assert networkx.shortest_path_length(graph, "node0/device0", "node0/device3") == 2
    assert networkx.shortest_path_length(graph, "node0/device0", "node2/device3") == 4
    assert graph.edges["node0", "fabric"]["bandwidth_gbps"] == 4 * cluster.inter.bandwidth_gbps
    assert "fabric" not in Cluster.parse("4xa100").topology()


@pytest.mark.parametrize(
    "fields",
    [
        {"bandwidth_gbps": 0, "latency_us": 1},
        {"bandwidth_gbps": 1, "latency_us": -1},
        {"bandwidth_gbps": 1, "latency_us": 1, "efficiency": 1.5},
        {"bandwidth_gbps": float("inf"), "latency_us": 1},
        {"bandwidth_gbps": 1, "latency_us": 1, "pair_bandwidth_gbps": 0},
    ],
)
def test_link_refuses(fields):
    with pytest.raises(ClusterError, match="Link"):
        Link(**fields)
