"""Every mesh and micro-batch, none twice, and a reason for what is left out."""

from __future__ import annotations

import pytest

from autoplan.errors import BatchError, DegreeError
from autoplan.search.space import Pins, enumerate_space


def space(devices: int = 8, layers: int = 6, global_batch: int = 16, **pins: int | str):  # type: ignore[no-untyped-def]
    return enumerate_space(
        devices=devices,
        layers=layers,
        global_batch=global_batch,
        divides=lambda degree: degree <= 4,
        pins=Pins(**pins),  # type: ignore[arg-type]
    )


def test_every_candidate_uses_all_devices_and_the_whole_batch() -> None:
    found = space().candidates
    assert len(found) == len(set(found))
    for candidate in found:
        assert candidate.degrees.size == 8
        assert candidate.degrees.data * candidate.micro_batch * candidate.micro_batches == 16
        assert candidate.degrees.pipe <= 6
        assert candidate.degrees.tensor <= 4
        assert candidate.schedule == ("1f1b" if candidate.micro_batches >= candidate.degrees.pipe else "gpipe")
    triples = {(c.degrees.pipe, c.degrees.data, c.degrees.tensor) for c in found}
    assert triples == {(1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 4, 1), (2, 2, 2), (2, 1, 4), (4, 2, 1), (4, 1, 2)}


def test_reasons_are_kept() -> None:
    reasons = {d.what: d.why for d in space().dropped}
    assert reasons["pipe 8"] == "8 stages, but 6 layers"
    assert reasons["tensor 8"] == "no dim of any parameter is a multiple of 8"
    dropped = space(global_batch=12).dropped
    assert any("data 8 does not divide a batch of 12" in d.why for d in dropped)


def test_pins_narrow_the_space() -> None:
    found = space(pipe=2, tensor=2, micro_batch=4).candidates
    assert [(c.degrees.data, c.micro_batches) for c in found] == [(2, 2)]
    assert str(Pins(pipe=2, micro_batch=4)) == "pipe 2, micro-batch 4"
    assert str(Pins()) == "nothing"


@pytest.mark.parametrize(
    ("pins", "error", "text"),
    [
        ({"pipe": 3}, DegreeError, "use one of 1, 2, 4, 8"),
        ({"pipe": 8}, DegreeError, "the model has 6; use one of 1, 2, 4"),
        ({"tensor": 8}, DegreeError, "use one of 1, 2, 4"),
        ({"pipe": 4, "tensor": 4}, DegreeError, "leave one of them free"),
        ({"data": 8, "micro_batch": 3}, BatchError, "use one of 1, 2"),
        ({"data": 8, "global_batch": 12}, BatchError, "use a batch of 8, 16, 32"),
        ({"pipe": 4, "micro_batch": 8, "tensor": 2, "schedule": "1f1b"}, DegreeError, "at most 2 micro-batches of 8"),
        ({"global_batch": 0}, BatchError, "at least 1"),
    ],
)
def test_refusals_say_what_is_possible(pins: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        space(**pins)
