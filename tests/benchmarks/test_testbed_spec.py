"""The testbed on paper: what a file may say, what fits on a machine, and what the kernel is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoplan.cost_models.cluster import Cluster
from autoplan.errors import ClusterError, UserError
from benchmarks.testbed import Testbed, TestbedSpec, machine
from benchmarks.testbed.cgroups import Controller, RankGroup, find_controller, make_parent, quota_and_period_us
from benchmarks.testbed.machine import Machine, check_fits, doubts, missing
from benchmarks.testbed.network import Network, Rate, address_of

TEXT = """\
nodes = 2
device = "cpu"
devices_per_node = 2
memory_gb = 0.5
[inter]
bandwidth_gbps = 0.0125
[testbed]
core_fraction = 0.4
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def spec(folder: Path, text: str = TEXT) -> TestbedSpec:
    return TestbedSpec.from_toml(write(folder, text))


def box(cores: int = 2, memory_bytes: int = 8_000_000_000, available_bytes: int = 6_000_000_000) -> Machine:
    return Machine(cores=tuple(range(cores)), memory_bytes=memory_bytes, available_bytes=available_bytes)


def test_one_file_serves_planner_and_testbed(tmp_path: Path) -> None:
    found = spec(tmp_path)
    assert found.cluster == Cluster.from_toml(tmp_path / "cluster.toml")
    assert found.core_fraction == 0.4
    assert found.inter_bytes_per_s == 25e6  # two devices' shares of 12.5 MB/s
    assert found.intra_bytes_per_s is None


def test_without_the_table_nothing_is_held(tmp_path: Path) -> None:
    found = spec(tmp_path, TEXT.split("[testbed]")[0])
    assert found.core_fraction is None
    assert spec(tmp_path, TEXT.replace("core_fraction = 0.4", "")).core_fraction is None


def test_loopback_is_held_only_at_a_rate_that_the_file_gives(tmp_path: Path) -> None:
    assert spec(tmp_path, TEXT + "[intra]\nbandwidth_gbps = 0.1\n").intra_bytes_per_s == 200e6
    assert spec(tmp_path, TEXT + "[intra]\nlatency_us = 30\n").intra_bytes_per_s is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[inter]", "[interr]", r"cluster\.toml:5: field `interr` is unknown; did you mean 'inter'"),
        ("[testbed]", "[tesbed]", r"cluster\.toml:7: field `tesbed` is unknown; did you mean 'testbed'"),
        (
            "core_fraction",
            "core_fractoin",
            r":8: field `testbed\.core_fractoin` is unknown; did you mean 'core_fraction'",
        ),
        (
            "core_fraction = 0.4",
            "core_fraction = 0",
            r":8: field `testbed\.core_fraction` must be at least 0\.01, not 0",
        ),
        ("core_fraction = 0.4", "core_fraction = -1", r"`testbed\.core_fraction` must be at least 0\.01, not -1"),
        ("core_fraction = 0.4", "core_fraction = 1.5", r"`testbed\.core_fraction` must be at most 1"),
        ("core_fraction = 0.4", 'core_fraction = "half"', r"`testbed\.core_fraction` must be a finite number"),
        ("0.0125", "0", r"cluster\.toml:6: field `inter\.bandwidth_gbps` must be greater than 0"),
        ("memory_gb = 0.5", "memory_gb = 0", r"cluster\.toml:4: field `memory_gb` must be greater than 0"),
    ],
)
def test_a_file_is_refused_by_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, TEXT.replace(old, new))
    with pytest.raises(ClusterError, match=message):
        TestbedSpec.from_toml(path)


def test_a_testbed_that_is_no_table_is_refused(tmp_path: Path) -> None:
    text = TEXT.split("[testbed]")[0].replace("nodes = 2", "nodes = 2\ntestbed = 3")
    with pytest.raises(ClusterError, match="testbed must be a table, not 3"):
        spec(tmp_path, text)


def test_a_spec_checks_itself() -> None:
    with pytest.raises(ClusterError, match="core_fraction must be from"):
        TestbedSpec(cluster=Cluster.parse("2xcpu"), core_fraction=0.0)


# -- whether it fits


def test_ranks_must_fit_on_their_cores(tmp_path: Path) -> None:
    four = spec(tmp_path)
    check_fits(four, box(cores=2))  # two ranks of 0.4 on each core
    with pytest.raises(ClusterError, match=r"1 cores, so 4 ranks share one; set core_fraction to at most 0\.25"):
        check_fits(four, box(cores=1))
    # 1.8 of 2 cores, but two of the three ranks share one
    three = TEXT.replace("nodes = 2", "nodes = 1").replace("node = 2", "node = 3").replace("0.4", "0.6")
    with pytest.raises(ClusterError, match=r"2 ranks share one; set core_fraction to at most 0\.5"):
        check_fits(spec(tmp_path, three), box(cores=2))
    check_fits(spec(tmp_path, TEXT.replace("core_fraction = 0.4", "")), box(cores=1))


def test_ranks_must_fit_into_memory(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"4 ranks of 0\.5 GB need 2 GB: .* set memory_gb to at most 0\.25"):
        check_fits(spec(tmp_path), box(memory_bytes=1_000_000_000))
    check_fits(spec(tmp_path), box(memory_bytes=2_000_000_000))


def test_what_was_not_checked_is_said(tmp_path: Path) -> None:
    assert doubts(spec(tmp_path), box()) == []
    full = doubts(spec(tmp_path, TEXT.replace("0.4", "0.5")), box())
    assert full == ["ranks fill 1 of a core: little is left to carry packets; up to 0.9 holds better"]
    assert "1 GB are free now" in doubts(spec(tmp_path), box(available_bytes=1_000_000_000))[0]
    fast = doubts(spec(tmp_path, TEXT.replace("0.0125", "50")), box())
    assert len(fast) == 1
    assert "inter link of 800 Gbit/s" in fast[0]


def test_ranks_are_spread_over_cores() -> None:
    assert [box(cores=2).core_of(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "tool", lambda name: None)
    monkeypatch.setattr(machine, "find_controller", lambda name: None)
    found = missing(spec(tmp_path))
    assert [line.split(":")[0] for line in found] == [
        "root",
        "ip and tc",
        "the cpu cgroup controller",
        "the memory cgroup controller",
    ]
    assert "apt install iproute2" in found[1]
    assert len(missing(spec(tmp_path, TEXT.split("[testbed]")[0]))) == 3  # nothing held: no cpu controller needed
    with pytest.raises(UserError, match=r"lacks\n  root: .*(\n.*)+--unshaped"), Testbed(spec(tmp_path)):
        pass


def test_a_container_may_have_less_than_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "_capabilities", lambda: 1 << 12)
    assert missing(spec(tmp_path))[0].startswith("CAP_SYS_ADMIN: root in this container")


# -- what the kernel is told


def test_the_quota_keeps_a_short_period_where_the_kernel_allows() -> None:
    assert quota_and_period_us(0.4) == (4_000, 10_000)
    assert quota_and_period_us(1) == (10_000, 10_000)
    assert quota_and_period_us(0.05) == (1_000, 20_000)  # less than 1 ms is not granted


def test_a_bucket_passes_a_frame_and_has_the_rate_in_payload() -> None:
    rate = Rate(bytes_per_s=25e6)
    assert rate.bucket("eth0") == "qdisc replace dev eth0 root tbf rate 201475190bit burst 25000 limit 268435456"
    assert pytest.approx(200e6) == 201_475_190 * 8948 / 9014
    slow, fast = Rate(bytes_per_s=1e6), Rate(bytes_per_s=1.25e9)
    assert slow.burst_bytes > 9014
    assert (fast.burst_bytes, fast.packet_bytes) == (1_250_000, 65_536)
    assert slow.packet_bytes <= slow.burst_bytes


def test_names_are_known_before_anything_is_made(tmp_path: Path) -> None:
    network = Network("apl1-0", spec(tmp_path))
    assert network.namespaces == ["apl1-0-h0", "apl1-0-h1", "apl1-0-switch"]
    assert [address_of(host) for host in (0, 1, 254, 255)] == ["10.77.0.1", "10.77.0.2", "10.77.0.255", "10.77.1.0"]


# -- cgroups, on folders that look like them


def test_each_controller_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    v2 = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    v1 = "cgroup /cg/cpuset cgroup rw,cpuset 0 0\ncgroup /cg/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    assert find_controller("cpu", v2) == Controller(name="cpu", version=2, root=tmp_path)
    assert find_controller("cpu", v1) == Controller(name="cpu", version=1, root=Path("/cg/cpu,cpuacct"))
    assert find_controller("cpu", v2 + v1).version == 1  # type: ignore[union-attr]
    assert find_controller("memory", v2 + v1).version == 2  # type: ignore[union-attr]
    assert find_controller("memory", v1) is None
    assert find_controller("io", v2) is None


def test_version_2_is_told_in_its_own_words(tmp_path: Path) -> None:
    folder = tmp_path / "apl1-0" / "r0"
    folder.mkdir(parents=True)
    for place in (tmp_path, tmp_path / "apl1-0"):
        (place / "cgroup.subtree_control").write_text("")
    for name, text in {
        "memory.stat": "anon 4096\nfile 8192\n",
        "memory.peak": "12288\n",
        "memory.events": "low 0\noom 3\noom_kill 2\n",
        "memory.swap.max": "max",
    }.items():
        (folder / name).write_text(text)
    cpu, memory = (Controller(name=name, version=2, root=tmp_path) for name in ("cpu", "memory"))
    assert make_parent("apl1-0", [memory, cpu]) == [tmp_path / "apl1-0"]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"  # the kernel adds; a file keeps the last
    assert (tmp_path / "apl1-0" / "cpu.weight").read_text() == "3200"
    group = RankGroup("apl1-0/r0", memory, cpu, limit_bytes=500_000_000)
    assert group.folders == [folder]
    assert (folder / "memory.max").read_text() == "500000000"
    assert (folder / "memory.swap.max").read_text() == "0"
    group.hold_cpu(0.4)
    assert (folder / "cpu.max").read_text() == "4000 10000"
    group.hold_cpu(None)
    assert (folder / "cpu.max").read_text() == "max 10000"
    assert (group.anon_bytes(), group.peak_bytes(), group.out_of_memory_kills()) == (4096, 12288, 2)
    assert group.reset_peak() is not None


def test_a_kernel_without_peaks_is_lived_with(tmp_path: Path) -> None:
    (tmp_path / "r0").mkdir()
    (tmp_path / "r0" / "memory.stat").write_text("anon 1\n")
    group = RankGroup("r0", Controller(name="memory", version=2, root=tmp_path), None, limit_bytes=4096)
    assert group.peak_bytes() is None
    assert group.reset_peak() is None
    group.hold_cpu(0.5)  # there is no controller to tell
    assert not (tmp_path / "r0" / "cpu.max").exists()


def test_a_refused_cgroup_is_a_message() -> None:
    with pytest.raises(UserError, match=r"cannot set up the cgroup /proc/nowhere: .*--unshaped"):
        RankGroup("nowhere", Controller(name="memory", version=1, root=Path("/proc")), None, limit_bytes=4096)
