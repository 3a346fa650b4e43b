"""A few of the zoo's architectures, end to end: captured, planned, run on ranks, held to one process."""

from __future__ import annotations

import pytest

from benchmarks.architectures import architectures
from benchmarks.zoo import Finding, examine, table, told


@pytest.mark.slow  # batch norms and their buffers; two towers and a loss over all rows; an encoder that a decoder reads
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["resnet", "clip", "t5", "lora-llama"])
def test_an_architecture_is_as_one_process_has_it(name: str) -> None:
    (architecture,) = architectures([name])
    if architecture.library == "peft":
        pytest.importorskip("peft", reason="peft is not installed (pip install '.[zoo]')")
    found = examine(architecture, seed=0)
    assert not found.wrong, told(found)
    assert len(found.plans) >= 2
    assert found.share >= 0.95
    assert set(found.meshes) == {"a line", "a plane", "stages"}


def test_what_went_wrong_is_told() -> None:
    found = Finding(name="broken", library="torch", wrong=["loss off by 1.0e+00 under | pipes"])
    assert "wrong" in told(found)
    assert "loss off by 1.0e+00 under \\| pipes" in table([found])
