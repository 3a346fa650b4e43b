"""The roofline and its efficiency tables."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.catalogue import device, device_names
from autoplan.cost_models.compute import efficiency, op_time_us
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.flops import matmul
from autoplan.cost_models.steps import EfficiencyTable, RateTable, inflate

devices = st.sampled_from(device_names()).map(device)
sizes = st.floats(0, 1e16)


@st.composite
def tables(draw):
    size_at = sorted(draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=5, unique=True)))
    fractions = sorted(draw(st.lists(st.floats(0.01, 1), min_size=len(size_at), max_size=len(size_at))))
    kept = [(size_at[0], fractions[0])]
    for size, fraction in zip(size_at[1:], fractions[1:], strict=True):
        if size / fraction > kept[-1][0] / kept[-1][1]:
            kept.append((size, fraction))
    return EfficiencyTable(steps=tuple(kept))


@given(tables(), sizes, sizes)
def test_inflated_size_is_monotone_and_at_least_the_size(table, one, other):
    small, large = sorted((one, other))
    assert inflate(small, table) <= inflate(large, table) * (1 + 1e-9)
    assert inflate(small, table) >= small * (1 - 1e-9)


@given(tables())
def test_table_entries_hold(table):
    for size, fraction in table.steps:
        assert efficiency(size, table) == pytest.approx(fraction)
    assert efficiency(table.steps[-1][0] * 1e3, table) == pytest.approx(table.steps[-1][1])
    assert efficiency(table.steps[0][0] / 1e3, table) == pytest.approx(table.steps[0][1])


@given(tables(), st.lists(sizes, min_size=1, max_size=6))
def test_arrays_and_expressions_agree_with_numbers(table, values):
    numbers = [inflate(value, table) for value in values]
    assert inflate(np.array(values), table) == pytest.approx(numbers)
    symbol = sympy.Symbol("n", positive=True)
    expression = inflate(symbol, table)
    assert [float(expression.subs(symbol, value)) for value in values] == pytest.approx(numbers)


def test_a_rate_may_depend_on_the_size():
    table = RateTable(steps=((1e5, 4.0), (1e6, 10.0)))
    chip = replace(device("cpu"), op_rates=(("gelu", table),), op_launches_us=(("gelu", 0.0),))
    times = [op_time_us(0, moved, "fp32", chip, "memory", "gelu") for moved in (5e4, 1e5, 5.5e5, 1e6, 1e7)]
    assert times == pytest.approx([12.5, 25, 62.5, 100, 1000])
    with pytest.raises(ClusterError, match="RateTable: list sizes in growing order, with size/rate growing too"):
        RateTable(steps=((1e5, 4.0), (1e6, 40.0)))


@pytest.mark.parametrize("steps", [(), ((1, 0.5), (1, 0.6)), ((1, 0.1), (2, 0.9)), ((1, 0),), ((1, 1.1),), ((0, 0.5),)])
def test_tables_that_are_refused(steps):
    with pytest.raises(ClusterError, match="EfficiencyTable"):
        EfficiencyTable(steps=steps)


@given(devices, sizes, sizes, st.floats(1, 10), st.sampled_from(["matmul", "memory"]))
def test_time_grows_with_work_and_bytes_and_beats_no_peak(chip, flops, moved, more, kind):
    precision = chip.precisions[0]
    time = op_time_us(flops, moved, precision, chip, kind)
    assert time >= chip.kernel_launch_us
    assert op_time_us(flops * more, moved, precision, chip, kind) >= time * (1 - 1e-9)
    assert op_time_us(flops, moved * more, precision, chip, kind) >= time * (1 - 1e-9)
    assert time * chip.memory_bandwidth_gbps * 1e3 >= moved
    if kind == "matmul":
        assert time * chip.flops_per_us(precision) >= flops * (1 - 1e-9)


@given(
    devices,
    st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5),
    st.sampled_from(["matmul", "memory"]),
    st.sampled_from([None, "gelu", "autoplan::attention", "unmeasured"]),
)
def test_vectorised_and_symbolic(chip, work, kind, op):
    chip = replace(
        chip,
        op_rates=(("gelu", RateTable(steps=((1e4, 1.0), (1e6, 8.0), (1e8, 3.0)))),),
        op_gflops=(("autoplan::attention", RateTable(steps=((1e6, 5.0), (1e9, 70.0)))),),
        op_launches_us=(("gelu", 50.0), ("autoplan::attention", 90.0)),
    )
    precision = chip.precisions[-1]
    numbers = [op_time_us(flops, moved, precision, chip, kind, op) for flops, moved in work]
    columns = np.array(work).T
    assert op_time_us(columns[0], columns[1], precision, chip, kind, op) == pytest.approx(numbers)
    flops, moved = sympy.symbols("flops moved", nonnegative=True)
    expression = op_time_us(flops, moved, precision, chip, kind, op)
    assert [float(expression.subs({flops: f, moved: m})) for f, m in work] == pytest.approx(numbers)


def test_figures_are_plausible():
    """Large bf16 matmuls as measured by many; small ones far below."""
    for name, low, high in (("h100", 600, 760), ("a100", 220, 270), ("mi300x", 500, 750)):
        chip, count = device(name), matmul(8192, 8192, 8192, 2)
        time = op_time_us(count.flops, count.bytes_moved, "bf16", chip)
        assert low <= count.flops / time / 1e6 <= high, name
    small = matmul(512, 512, 512, 2)
    assert op_time_us(small.flops, small.bytes_moved, "bf16", device("h100")) < 10
    # a gigabyte read and written once at about 3 TB/s
    assert 600 <= op_time_us(0, 2e9, "bf16", device("h100"), "memory") <= 800


def test_pointwise_work_binds_only_where_bandwidth_is_plentiful():
    for name, bound in (("h100", False), ("cpu", True)):
        chip = device(name)
        light, heavy = (op_time_us(per_byte * 1e8, 1e8, "fp32", chip, "memory") for per_byte in (0.25, 5))
        assert (heavy > light) is bound


def rates(**by_op):
    return tuple((op, RateTable.constant(rate)) for op, rate in by_op.items())


def test_a_measured_op_runs_at_its_own_rate():
    plain = device("cpu")
    chip = replace(plain, op_rates=rates(_softmax=2.0), op_gflops=(("autoplan::attention", RateTable.constant(50.0)),))
    launch = chip.kernel_launch_us
    assert op_time_us(1e9, 4e6, "fp32", chip, "memory", "_softmax") == pytest.approx(launch + 2000)
    assert op_time_us(1e9, 4e6, "fp32", chip, "matmul", "autoplan::attention") == pytest.approx(launch + 20_000)
    # few FLOPs on many bytes stay bound by memory
    assert op_time_us(1e3, 30e6, "fp32", chip, "matmul", "autoplan::attention") > 1000
    for kind in ("memory", "matmul"):
        assert op_time_us(1e6, 4e6, "fp32", chip, kind, "gelu") == op_time_us(1e6, 4e6, "fp32", plain, kind)


def test_an_op_may_have_its_own_launch_cost_and_figures_for_one_precision():
    chip = replace(
        device("cpu"),
        op_rates=rates(**{"_softmax": 2.0, "_softmax.bf16": 1.0}),
        op_launches_us=(("_softmax", 30.0), ("bmm.fp32", 80.0)),
    )
    assert op_time_us(0, 4e6, "fp32", chip, "memory", "_softmax") == pytest.approx(30 + 2000)
    assert op_time_us(0, 4e6, "bf16", chip, "memory", "_softmax") == pytest.approx(30 + 4000)
    assert op_time_us(0, 0, "fp32", chip, "matmul", "bmm") == 80
    assert op_time_us(0, 0, "bf16", chip, "matmul", "bmm") == chip.kernel_launch_us


def test_a_precision_may_have_its_own_matmul_table():
    slow = EfficiencyTable(steps=((1.0, 0.01),))
    chip = replace(device("h100"), matmul_efficiency_of=(("fp32", slow),))
    at = {precision: op_time_us(1e12, 0, precision, chip) for precision in ("fp32", "bf16")}
    assert at["fp32"] == pytest.approx(chip.kernel_launch_us + 1e12 / chip.flops_per_us("fp32") / 0.01)
    assert at["bf16"] == op_time_us(1e12, 0, "bf16", device("h100"))


def test_refusals():
    with pytest.raises(ClusterError, match="v100-sxm-16 has no bf16"):
        op_time_us(1, 1, "bf16", device("v100"))
    with pytest.raises(ClusterError, match="v100"):
        op_time_us(1, 1, "bf16", device("v100"), "memory")
    with pytest.raises(ClusterError, match="'matmul'"):
        op_time_us(1, 1, "bf16", device("h100"), "matmull")


def test_shipped_tables_rise():
    for name in device_names():
        for table in (device(name).matmul_efficiency, device(name).memory_efficiency):
            assert all(low[1] <= high[1] for low, high in itertools.pairwise(table.steps))
