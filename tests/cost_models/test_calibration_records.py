"""Rows of measurements, read and written."""

import json

import pytest

from autoplan.cost_models.calibration_records import CollectiveTime, Constant, OpTime, read_rows, to_row
from autoplan.cost_models.errors import ClusterError

RECORDS = (
    OpTime(op="gelu", kind="memory", precision="fp32", flops=0, bytes_moved=8e6, launches=1, time_us=900.0),
    OpTime(op="", kind="memory", precision="fp32", flops=0, bytes_moved=1e4, launches=1, time_us=3.0),
    OpTime(op="mm", kind="matmul", precision="bf16", flops=1e9, bytes_moved=8e6, launches=1, time_us=9e3),
    CollectiveTime(kind="all_reduce", level="inter", members=4, per_node=2, size_bytes=1e6, time_us=800.0),
    Constant(name="reserved_bytes", value=2e8),
)


def test_round_trip_through_json():
    rows = json.loads(json.dumps([to_row(record) for record in RECORDS]))
    assert {row["record"] for row in rows} == {"op", "collective", "constant"}
    assert read_rows(rows) == RECORDS


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, {"record": "opp"}, "measurement 0: field `record` 'opp' is unknown; did you mean 'op'"),
        (0, {"value": "fast"}, "measurement 0: field `value` must be a finite number"),
        (0, {"value": 0}, "OpTime 'gelu': time_us must be greater than 0"),
        (0, {"precision": "fp23"}, "OpTime 'gelu': precision 'fp23' is unknown; did you mean 'fp32'"),
        (0, {"colour": 1}, "measurement 0: field `colour` is unknown"),
        (3, {"kind": "gather"}, "CollectiveTime gather: kind 'gather' is unknown; did you mean"),
        (3, {"members": 1}, "members must be at least 2"),
        (4, {"name": "speed"}, "Constant: name 'speed' is unknown"),
    ],
)
def test_rows_that_are_refused(place, change, message):
    rows = [to_row(record) for record in RECORDS]
    rows[place] |= change
    with pytest.raises(ClusterError, match=message):
        read_rows(rows)


def test_a_missing_field_is_named():
    row = to_row(RECORDS[3])
    del row["size_bytes"]
    with pytest.raises(ClusterError, match="measurement 0: field `size_bytes` is missing"):
        read_rows([row])
