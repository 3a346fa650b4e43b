"""The command line: what people mistype, what it writes, and that one command makes what the next one reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import autoplan
from autoplan.cli import app
from autoplan.cli.files import write_whole
from autoplan.cli.origin import Origin, origin_of, with_origin
from autoplan.errors import PlanFileError, UserError
from autoplan.plans import PlanDocument
from autoplan.report.facts import ORIGIN_NOTE

TINY = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def call(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: str | int | Path) -> str:
    """The message of a command that must end with exit code 2, one message, no traceback, nothing on stdout."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("autoplan: ")
    return result.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def planned(tiny: Path) -> Path:
    """plan.json with both reports, made by the command line for two local ranks."""
    folder = tiny.parent
    out, page, text = (folder / f"plan.{ending}" for ending in ("json", "html", "md"))
    result = call("plan", tiny, "-c", "local:2", "-b", 4, "--precision", "fp32", "-o", out, "-r", page, "-r", text)
    assert result.exit_code == 0, result.output
    assert "tiny on local-2xcpu" in result.stdout
    return folder / "plan.json"


def edited(planned: Path, into: Path, **changes: Any) -> Path:
    data = json.loads(planned.read_text())
    path = into / "edited.json"
    path.write_text(json.dumps(data | changes))
    return path


def test_help_is_quick_because_torch_is_not_imported() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from autoplan.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'sympy', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert call("--version").stdout == f"autoplan {autoplan.__version__}\n"


def test_devices() -> None:
    result = call("devices")
    assert result.exit_code == 0
    assert "h100-sxm" in result.stdout
    assert 'source = "' in call("devices", "h100").stdout
    assert "did you mean" in refused("devices", "h1000")


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_unknown_names(command: str) -> None:
    assert "did you mean llama3-8b" in refused(command, "lama3-8b", "-c", "8xh100-sxm", "-b", "8")
    assert "no device is called 'h100-sxn'" in refused(command, "gpt2", "-c", "8xh100-sxn", "-b", "8")
    assert "cannot read the cluster" in refused(command, "gpt2", "-c", "8 h100", "-b", "8")


def test_malformed_cluster_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("nodes = \n")
    assert "not valid TOML" in refused("plan", "gpt2", "-c", path, "-b", "8")
    path.write_text('nodes = 1\ndevice = "h100-sxm"\nmemmory_gb = 3\n')
    message = refused("plan", "gpt2", "-c", path, "-b", "8")
    assert "cluster.toml:3" in message
    assert "memory_gb" in message
    assert "No such file" in refused("plan", "gpt2", "-c", tmp_path / "none.toml", "-b", "8")


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    base = ("plan", "gpt2", "-c", "8xh100-sxm", "-b", "8")
    assert "there is no folder" in refused(*base, "-o", tmp_path / "no" / "plan.json")
    assert "must end in one of .html" in refused(*base, "-r", tmp_path / "report.pdf")
    assert "it is a folder" in refused(*base, "-o", tmp_path)
    assert "named twice" in refused(*base, "-r", tmp_path / "a.md", "-r", tmp_path / "a.md")
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_are_two_as_well() -> None:
    for arguments in (["plan"], ["plan", "gpt2", "-c", "8xh100-sxm", "-b", "0"], ["nonsense"]):
        assert call(*arguments).exit_code == 2


def test_a_batch_that_does_not_divide_leaves_no_file(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    message = refused("plan", tiny, "-c", "local:2", "-b", "3", "--dp", "2", "-o", out)
    assert "batch of 2, 4" in message
    assert list(tmp_path.iterdir()) == []
    assert "does not divide 2 devices" in refused("plan", tiny, "-c", "local:2", "-b", "4", "--tp", "3")
    assert "16 positions" in refused("plan", tiny, "-c", "local:2", "-b", "4", "-s", "17")


def test_nothing_fits(tiny: Path, tmp_path: Path) -> None:
    message = refused("plan", tiny, "-c", "local:2", "-b", "4", "--memory-gb", "0.0001", "-o", tmp_path / "plan.json")
    assert "nothing fits" in message
    assert list(tmp_path.iterdir()) == []


def test_a_plan_and_its_reports(planned: Path, tiny: Path) -> None:
    document = PlanDocument.load(planned)
    assert document.plan.fingerprint.model_name == "tiny"
    assert document.plan.degrees.size == 2
    origin = origin_of(document)
    assert origin is not None
    assert origin.model == str(tiny.resolve())
    assert "<title>tiny on local-2xcpu" in planned.with_suffix(".html").read_text()
    assert planned.with_suffix(".md").read_text().startswith("# tiny on local-2xcpu\n")


def test_pins_are_kept(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = call(
        "plan", tiny, "-c", "local:2", "-b", 4, "--tp", 2, "--micro-batch", 2, "--recompute", "full", "-q", "-o", out
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    plan = PlanDocument.load(out).plan
    assert (plan.degrees.tensor, plan.micro_batch) == (2, 2)
    assert {layer.recompute for layer in plan.layers} == {"full"}


def test_estimate_prices_what_it_is_given_even_if_it_does_not_fit(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = call(
        "estimate", tiny, "-c", "local:2", "-b", 4, "--pp", 2, "--memory-gb", "0.0001", "--recompute", "full", "-o", out
    )
    assert result.exit_code == 0, result.output
    assert "This plan does not fit" in result.stdout
    document = PlanDocument.load(out)
    assert document.plan.degrees.pipe == 2
    assert document.estimate.proof.status == "priced"
    assert {layer.recompute for layer in document.plan.layers} == {"full"}


def test_compare(planned: Path, tmp_path: Path) -> None:
    result = call("compare", planned, planned)
    assert result.exit_code == 0, result.output
    assert "peak memory" in result.stdout
    assert result.stderr == ""
    data = json.loads(planned.read_text())
    data["plan"]["fingerprint"]["seq"] = 8
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    assert "is for another seq" in call("compare", planned, other).stderr
    assert "at least two" in refused("compare", planned)


@pytest.mark.parametrize("command", ["compare", "run"])
def test_damaged_plans(command: str, planned: Path, tmp_path: Path) -> None:
    more = [planned] if command == "compare" else []
    path = tmp_path / "plan.json"
    assert "cannot read" in refused(command, path, *more)
    path.write_text(planned.read_text()[:-40])
    assert "not valid JSON" in refused(command, path, *more)
    assert "schema version 99" in refused(command, edited(planned, tmp_path, schema_version=99), *more)
    assert "is damaged" in refused(command, edited(planned, tmp_path, plan={}), *more)


@pytest.mark.processes
@pytest.mark.slow  # starts two ranks, of which none may train and only one may speak
@pytest.mark.timeout(300)
def test_run_refuses_what_the_model_lacks(planned: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(planned.read_text())["plan"]
    for strategy in plan["strategies"]:
        strategy["choices"][0] = "bogus"
    message = refused("run", edited(planned, tmp_path, plan=plan))
    assert message.startswith("autoplan: the plan does not fit the model: strategy ")
    assert "has 'bogus' for " in message
    assert message.count("\n") == 1
    said = capfd.readouterr()  # what the ranks wrote
    assert "Traceback" not in said.err
    assert "does not fit" not in said.err
    assert "step " not in said.out


def test_run_needs_to_know_the_model(planned: Path, tmp_path: Path) -> None:
    assert "does not say which model" in refused("run", edited(planned, tmp_path, notes=[]))
    assert "note on its model is damaged" in refused("run", edited(planned, tmp_path, notes=[ORIGIN_NOTE + "{"]))
    moved = json.dumps({"model": "/no/such/config.json", "cluster": {}})
    assert "cannot read the model" in refused("run", edited(planned, tmp_path, notes=[ORIGIN_NOTE + moved]))


def test_run_checks_its_data(planned: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    assert "cannot read the data file" in refused("run", planned, "--data", short)
    short.write_text("short")
    assert "the data has 5 bytes" in refused("run", planned, "--data", short)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_trains_what_plan_planned(planned: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "autoplan",
        "run",
        str(planned),
        "--steps",
        "3",
        "--data",
        __file__,
        "--lr",
        "1e-2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def test_origin_round_trips(planned: Path) -> None:
    document = PlanDocument.load(planned)
    one, two = Origin(model="m", cluster={"nodes": 1}), Origin(model="n", cluster={})
    again = with_origin(with_origin(document, one), two)
    assert origin_of(again) == two
    assert sum(note.startswith(ORIGIN_NOTE) for note in again.notes) == 1


def test_origin_notes_refuse_what_they_do_not_know(planned: Path) -> None:
    document = PlanDocument.load(planned).to_json().replace('\\"model\\":', '\\"modell\\":')
    with pytest.raises(PlanFileError, match="damaged"):
        origin_of(PlanDocument.from_json(document))


def test_files_are_all_written_or_none(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("old")
    with pytest.raises(UserError, match="cannot write"):
        write_whole({old: "new", tmp_path / "missing" / "x": "y"})
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]
    write_whole({old: "new"})
    assert old.read_text() == "new"
