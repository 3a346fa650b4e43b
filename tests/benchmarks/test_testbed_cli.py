"""The testbed's command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.testbed.__main__ import app
from tests.benchmarks.testbeds import (
    ROOT,
    cluster_file,
    remains,
    shaped,
)

pytestmark = pytest.mark.processes


def test_the_command_line_runs_a_command_on_every_rank(tmp_path: Path) -> None:
    place = str(cluster_file(tmp_path))
    done = CliRunner().invoke(app, ["up", place, "--unshaped", "--", "sh", "-c", "exit $((RANK * 5))"])
    assert done.exit_code == 5, done.output
    assert "failed" in done.output
    done = CliRunner().invoke(app, ["up", place, "--unshaped", "--", "true"])
    assert done.exit_code == 0, done.output


def test_the_command_line_tells_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('nodes = 2\ndevice = "cpu"\n[interr]\n')
    done = CliRunner().invoke(app, ["up", str(wrong)])
    assert done.exit_code == 2
    assert "`interr` is unknown; did you mean 'inter'" in done.output
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["up", str(cluster_file(tmp_path))])
    assert done.exit_code == 2
    assert "root: namespaces and cgroups are its to make; run with sudo" in done.output
    assert "--unshaped" in done.output
    assert "Traceback" not in done.output


@shaped
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_holds_until_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed", "up", str(cluster_file(tmp_path))],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in the background
    )
    name, told = f"apl{process.pid}-0", ""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            told += line
            if "Ctrl-C" in line:
                break
        assert remains(name)
        assert name in CliRunner().invoke(app, ["status"]).output
        assert f"{name} is in use" in CliRunner().invoke(app, ["down"]).output
        process.send_signal(number)
        told += lines.read()
    assert process.wait(10) == (0 if number == signal.SIGINT else 128 + number)
    assert "200 Mbit/s" in told
    assert "Traceback" not in told
    assert remains(name) == []
