"""Every shipped chip loads, says where its figures come from, and is found under its names."""

import re
import tomllib

import pytest

from autoplan.cost_models.catalogue import DATA, catalogue, device, device_names, load_device
from autoplan.cost_models.device import Device
from autoplan.cost_models.errors import ClusterError

FILES = sorted(DATA.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_loads_and_is_named_after_its_device(path):
    loaded = load_device(path)
    assert loaded.name == path.stem
    assert device(loaded.name) == loaded
    assert all(device(alias) is device(loaded.name) for alias in loaded.aliases)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_section_has_source_and_date(path):
    data = tomllib.loads(path.read_text())
    sections = {name: table for name, table in data.items() if isinstance(table, dict)}
    assert len(sections) == 7
    for table in sections.values():
        assert len(table["source"]) > 10
        assert re.fullmatch(r"20\d\d(-\d\d){0,2}", table["date"])


@pytest.mark.parametrize("name", device_names())
def test_round_trip(name):
    assert Device.from_dict(device(name).to_dict()) == device(name)


@pytest.mark.parametrize("name", device_names())
def test_figures_are_plausible(name):
    found = device(name)
    assert 1e9 <= found.memory_bytes <= 300e9
    assert found.scale_out.bandwidth_gbps <= found.scale_up.bandwidth_gbps
    assert found.memory_bandwidth_gbps > found.scale_up.bandwidth_gbps
    assert "bf16" in found.precisions or found.name.startswith("v100")
    if found.backend != "cpu":
        half = max(found.flops_per_us(p) for p in ("bf16", "fp16") if p in found.precisions)
        assert 100e6 <= half <= 3000e6


def test_the_chips_people_ask_for_are_there():
    wanted = "v100 a100 a100-40gb-sxm a100-80gb-sxm a100-pcie a800 h100 h100-96gb h800 h200 b200 b300 gb200 gb300 "
    wanted += "mi250x mi300x tpu-v4 tpu-v5p tpu-v6e gaudi2 gaudi3 trainium2 cpu"
    # as published measurements name them
    wanted += " h100-80gb-sxm b200-180gb-sxm gb200-nvl72 h100-96gb-hbm2e-500w gb300-nvl72 v100-32gb-sxm a100-80gb-pcie"
    wanted += " h200-141gb-sxm b300-288gb-sxm a800-80gb-sxm v100-16gb-sxm mi300x-192gb mi250x-gcd-64gb h800-80gb-sxm"
    assert all(device(name) for name in wanted.split())


def test_unknown_device_names_the_nearest():
    with pytest.raises(ClusterError, match="'h100-sxm'"):
        device("h100-smx")
    assert device(" H100-SXM ").name == "h100-sxm"


def test_missing_arithmetic_names_what_there_is():
    with pytest.raises(ClusterError, match="has no fp8 arithmetic; plan with one of fp64"):
        device("a100").flops_per_us("fp8")


def test_errors_name_file_line_and_field(tmp_path):
    text = (DATA / "h100-sxm.toml").read_text()
    path = tmp_path / "chip.toml"
    path.write_text(text.replace("kernel_us = 3.0", "kernel_us = -3.0"))
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.startswith("kernel_us"))
    with pytest.raises(ClusterError, match=rf"chip\.toml:{line}: field `launch\.kernel_us` must be at least 0"):
        load_device(path)
    path.write_text(text + "colour = 3\n")
    with pytest.raises(ClusterError, match=r"`memory_efficiency\.colour` is unknown"):
        load_device(path)
    path.write_text(text.replace("[1e9, 0.20]", "[1e9, 0.90]").replace("[1e10, 0.45]", "[1e10, 1.45]"))
    with pytest.raises(ClusterError, match=r"matmul_efficiency\.steps` is refused.*at most 1"):
        load_device(path)
    path.write_text(text.replace('backend = "cuda"', 'backend = "cdua"'))
    with pytest.raises(ClusterError, match=r"chip\.toml:4: field `backend` 'cdua' is unknown; did you mean 'cuda'"):
        load_device(path)
    assert len(catalogue()) == len(FILES)
