"""What is said about a plan, and about there being none: the claims are checked against prices."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from autoplan.errors import InfeasibleError
from autoplan.search.explain import why
from autoplan.search.planner import solve_problem
from autoplan.search.space import Pins
from tests.search.synthetic import cluster, problem


def test_why_a_plan() -> None:
    document = solve_problem(problem(cluster(memory_bytes=12 * 10**9)))
    said = why(document)
    assert document.notes == tuple(said)
    assert re.search(r"A step of .* is compute \d+%.*holds .* of 12\.0 GB", said[0])
    fastest = min(h.estimate.step_us for h in document.hand_plans if h.estimate.fits)
    gain = fastest / document.estimate.step_us - 1
    assert f"faster by {gain:.1%} than the best plan made by hand" in said[1]
    ddp = next(text for text in said if text.startswith("ddp"))
    assert re.search(r"does not fit: every device needs .* and has 12\.0 GB \(.* optimizer state", ddp)
    assert said[-1].startswith("Proved: no plan in the space is faster")


def test_figures_are_written_as_in_reports() -> None:
    """No exponents, however large: 1.30 TB, not 1.3e+03 GB; 1,300 TB."""
    document = solve_problem(problem(cluster(memory_bytes=12 * 10**9)))
    for size_bytes, words in ((13 * 10**11, "of 1.30 TB"), (13 * 10**14, "of 1,300 TB")):
        estimate = structs.replace(document.estimate, device_memory_bytes=size_bytes)
        assert words in why(structs.replace(document, estimate=estimate))[0]
    slow = structs.replace(document.estimate, step_us=3e10)
    assert why(structs.replace(document, estimate=slow))[0].startswith("A step of 8.33 h is ")
    assert not any(re.search(r"\de[+-]\d", text) for text in why(document))
    assert not re.search(r"\de[+-]\d", refusal(memory_gb=0.001))


def refusal(pins: Pins | None = None, memory_gb: float = 2.0, global_batch: int = 64) -> str:
    given = problem(cluster(memory_bytes=int(memory_gb * 1e9)), global_batch=global_batch)
    with pytest.raises(InfeasibleError) as caught:
        solve_problem(given, pins=pins)
    return str(caught.value)


def test_the_binding_resource_and_more_devices() -> None:
    text = refusal(memory_gb=2.5)
    assert "has 2.50 GB" in text
    assert re.search(r"Cheapest way out: \d+ times the nodes, \d+ devices: .* fits there", text)
    multiple = int(re.search(r"(\d+) times the nodes", text)[1])  # type: ignore[index]
    larger = problem(cluster(nodes=multiple, memory_bytes=25 * 10**8), global_batch=64)
    assert solve_problem(larger).estimate.fits


@pytest.mark.parametrize(
    ("pins", "memory_gb", "way"),
    [
        (Pins(zero=0, pipe=1, tensor=1), 20.0, "use ZeRO [123]"),
        (Pins(recompute="none", tensor=1, pipe=1), 9.0, "let layers be recomputed"),
        (Pins(micro_batch=8, pipe=1, tensor=1, recompute="none"), 20.0, "use a micro-batch of [124]"),
    ],
)
def test_letting_a_pin_go_comes_before_buying(pins: Pins, memory_gb: float, way: str) -> None:
    text = refusal(pins, memory_gb)
    assert re.search(f"(Cheapest way out: |Or ){way}", text)


def test_no_way_out() -> None:
    assert "use a smaller model" in refusal(memory_gb=0.001)
