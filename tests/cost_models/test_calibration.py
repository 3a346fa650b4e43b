"""What a known cluster would measure, fitted: the known constants come out, and plans see them."""

import json
from dataclasses import replace

import pytest

from autoplan.cost_models.calibration import fit
from autoplan.cost_models.calibration_records import CollectiveTime, Constant, OpTime, read_rows, to_row
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import KINDS, collective_time_us
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.mesh import GroupShape
from tests.cost_models.measurements import FLOPS, GROUPS, OP_BYTES, known_cluster, measurements

START = Cluster.parse("2x2xcpu")
DATE = "2026-12-01"


def prices(cluster):
    """Times of all that was measured, and of sizes between."""
    device = cluster.device
    between = [size * 3 for size in OP_BYTES]
    found = {
        (name, moved): op_time_us(0, moved, "fp32", device, "memory", name)
        for name in ("_softmax", "gelu")
        for moved in (*OP_BYTES[1:], *between[1:])
    }
    found |= {("adamw", moved): op_time_us(0, moved, "fp32", device, "memory", "adamw") for moved in OP_BYTES[2:4]}
    found |= {("copy", moved): op_time_us(0, moved, "fp32", device, "memory") for moved in (1e5, 1e6, 3e7)}
    for precision in ("fp32", "bf16"):
        found |= {(precision, flops): op_time_us(flops, 0, precision, device, "matmul", "mm") for flops in FLOPS[1:]}
    found |= {("bmm", flops): op_time_us(flops, 0, "fp32", device, "matmul", "bmm") for flops in FLOPS[1:]}
    for kind in KINDS:
        for level, members, per_node in GROUPS:
            shape = GroupShape(size=members, per_node=members if level == "intra" else per_node)
            if kind != "send" or members == 2:
                for size in (1_024, 500_000, 8_000_000):
                    found[kind, shape, size] = float(collective_time_us(kind, size, shape, cluster))
    return found


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.02), (0.05, 0.2), (0.15, 0.5)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_known_constants_come_out(noise, within, seed):
    known = known_cluster()
    found = fit(START, measurements(known, noise, seed), date=DATE).cluster
    expected = prices(known)
    for what, time_us in prices(found).items():
        assert time_us == pytest.approx(expected[what], rel=within), what
    assert found.device.kernel_launch_us == pytest.approx(7.0, rel=noise + 1e-3)
    assert (found.device.comm_slowdown, found.device.reserved_bytes) == (0.3, 240_000_000)


def test_what_calls_cost_more_among_others_is_part_of_every_launch_but_those_of_views_and_optimizers():
    records = measurements(known_cluster())
    alone = fit(START, records, date=DATE)
    mixed = fit(START, [*records, Constant(name="mixed_launch_us", value=10.0)], date=DATE)
    view = Constant(name="view_launch_us", value=3.0)
    viewed = fit(START, [*records, Constant(name="mixed_launch_us", value=10.0), view], date=DATE)
    assert mixed.residuals == alone.residuals
    before, after = alone.cluster.device, mixed.cluster.device
    for flops, moved, kind, op in ((0, 1e5, "memory", "gelu"), (0, 1e5, "memory", "log"), (1e7, 0, "matmul", "bmm")):
        expected = op_time_us(flops, moved, "fp32", before, kind, op) + 10.0
        assert op_time_us(flops, moved, "fp32", after, kind, op) == pytest.approx(expected, abs=0.01)
    assert op_time_us(0, 1e5, "fp32", after, "memory", "adamw") == op_time_us(0, 1e5, "fp32", before, "memory", "adamw")
    assert dict(viewed.cluster.device.op_launches_us)["view"] == 3.0


def test_residuals_are_the_models_own_errors():
    exact = fit(START, measurements(known_cluster()), date=DATE).residuals
    noisy = fit(START, measurements(known_cluster(), 0.15), date=DATE).residuals
    assert {residual.what for residual in exact} >= {"gelu", "adamw", "products, fp32", "bmm.fp32"}
    assert {residual.what for residual in exact} >= {"all_reduce of 4, 2 on each node", "send of 2, in a node"}
    assert max(residual.worst for residual in exact) < 0.02
    collectives = [residual for residual in noisy if residual.section == "collectives"]
    assert 0.02 < max(residual.median for residual in collectives) < 0.2
    assert all(residual.points == 15 and residual.median <= residual.worst for residual in collectives)


def test_the_file_says_where_its_figures_are_from(tmp_path):
    calibration = fit(START, measurements(known_cluster(), 0.1), date=DATE)
    path = tmp_path / "calibrated.toml"
    path.write_text(calibration.cluster.to_toml())
    read = Cluster.from_toml(path)
    assert read.device == calibration.cluster.device
    assert read.collectives == calibration.cluster.collectives
    assert read.fingerprint() == calibration.cluster.fingerprint()
    notes = {figure.section: figure for figure in read.device.figures}
    for section in ("matmul_efficiency", "memory_efficiency", "op_rates", "op_gflops"):
        assert "off by" in notes[section].source
        assert notes[section].date == DATE
    assert notes["overlap"].source == "measured by autoplan calibrate"
    assert all("off by" in made.source and made.date == DATE for made in read.collectives)
    assert notes["scale_up"] == next(f for f in START.device.figures if f.section == "scale_up")


def test_what_was_not_measured_stays():
    known = known_cluster()
    records = [r for r in measurements(known) if isinstance(r, CollectiveTime) and r.kind == "all_reduce"]
    found = fit(START, records, date=DATE).cluster
    assert replace(found.device, name=START.device.name, title=START.device.title, aliases=START.device.aliases) == (
        START.device
    )
    assert {made.kind for made in found.collectives} == {"all_reduce"}
    # measuring sends later keeps the all-reduces
    sends = [r for r in measurements(known) if isinstance(r, CollectiveTime) and r.kind == "send"]
    again = fit(found, sends, date=DATE).cluster
    assert {made.kind for made in again.collectives} == {"all_reduce", "send"}
    assert again.device.name == found.device.name == "cpu-calibrated"


def test_fitting_twice_changes_nothing():
    records = measurements(known_cluster(), 0.1)
    once = fit(START, records, date=DATE).cluster
    assert fit(once, records, date=DATE).cluster == once


def test_a_precision_that_the_catalogue_lacks_is_learnt():
    records = [
        OpTime(op="mm", kind="matmul", precision="fp8", flops=f, bytes_moved=0, launches=1, time_us=1 + f / 4e5)
        for f in FLOPS
    ]
    found = fit(START, records, date=DATE).cluster.device
    assert "fp8" in found.precisions
    assert op_time_us(1e9, 0, "fp8", found) == pytest.approx(2500, rel=0.02)


def test_rows_of_a_run_can_be_fitted():
    rows = json.loads(json.dumps([to_row(record) for record in measurements(known_cluster())]))
    assert fit(START, read_rows(rows), date=DATE).cluster.device.reserved_bytes == 240_000_000


def test_nothing_to_fit():
    with pytest.raises(ClusterError, match="autoplan calibrate"):
        fit(START, [])


def test_the_date_is_today_if_not_given():
    found = fit(START, [Constant(name="comm_slowdown", value=0.1)]).cluster
    note = next(figure for figure in found.device.figures if figure.section == "overlap")
    assert len(note.date) == len(DATE)
