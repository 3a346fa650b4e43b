"""Plan a small GPT-2, train it by the plan on four local ranks, and hold it to the same training on one process.

    python -m benchmarks.demo            # or `make demo`; writes plan.json, report.md and report.html here

The devices are given so little memory that plain data parallelism (a whole replica on each) cannot fit, which is
asserted; the plan has to shard. Tokens are the bytes of Python's own standard library, read where this runs. Exit code
0 only if the loss falls and the two loss curves agree to 1e-4 in float32.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoplan import api, units
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.models.text import BYTES, ByteText
from autoplan.plans import PlanDocument
from autoplan.report import report_html, report_markdown, report_text
from autoplan.runtime.launch import Session, launch

RANKS = 4
MEMORY_BYTES = 22_000_000  # of one device; float32 AdamW alone needs 16 bytes for each of about 1.9 million parameters
ROWS, SEQ = 16, 128  # global batch
LAYERS, WIDTH, HEADS = 4, 192, 4
LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
TEXT_BYTES = 1_000_000
TOLERANCE = 1e-4  # relative, float32: sums in another order, 30 steps of AdamW


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, as plain data for the ranks."""

    steps: int
    seed: int


def build(seed: int) -> nn.Module:
    """GPT-2's architecture, random weights; no dropout, so that two runs can be compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=BYTES, n_positions=SEQ, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: nn.Module = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # what it falls back to, with a warning
    return model.train()


def text(seed: int) -> ByteText:
    """About a megabyte of the standard library's sources, in the order of their names."""
    files: list[Path] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        files.append(path)
        size += path.stat().st_size
        if size > TEXT_BYTES:
            break
    return ByteText.read(files, seed=seed)


def batches(run: Run) -> Iterator[dict[str, Tensor]]:
    """The global batch of each step."""
    data = text(run.seed)
    return (data.batch(index, ROWS, SEQ) for index in range(run.steps))


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LEARNING_RATE)


def train_by_plan(session: Session, plan_json: str, cluster: dict[str, Any], run: Run) -> list[float]:
    """One rank."""
    torch.set_num_threads(1)
    step = api.compile(
        build(run.seed),
        Cluster.from_dict(cluster),
        optimizer=adamw,
        plan=PlanDocument.from_json(plan_json),
        clip_norm=CLIP_NORM,
    )
    return [float(step(batch)) for batch in batches(run)]


def train_plainly(run: Run) -> list[float]:
    """The same training as anybody would write it for one process."""
    torch.set_num_threads(1)  # as each rank has
    model = build(run.seed)
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches(run):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_plan(run: Run) -> tuple[PlanDocument, Cluster]:
    cluster = Cluster.local(devices=RANKS, memory_bytes=MEMORY_BYTES)
    with torch.device("meta"):
        model = build(run.seed)
        batch = {name: torch.empty(ROWS, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
    return api.plan(model, cluster, batch, precision="fp32"), cluster


def require_that_ddp_does_not_fit(document: PlanDocument) -> None:
    """The point of the demo: a replica on every device is more than the device holds."""
    ddp = next(a for a in document.hand_plans if a.plan.name == "ddp")
    if ddp.estimate.fits:
        raise SystemExit(f"demo: plain data parallelism fits in {units.size(MEMORY_BYTES)}; state less memory")
    need = units.size(ddp.estimate.peak_bytes)
    print(f"plain data parallelism needs {need} on every device, which has {units.size(MEMORY_BYTES)}: it cannot run\n")


def compare(planned: list[float], plain: list[float]) -> bool:
    """Print both curves; whether they agree and fall."""
    differences = [abs(a - b) / abs(b) for a, b in zip(planned, plain, strict=True)]
    print("step  by the plan  one process  relative difference")
    for index, (a, b, difference) in enumerate(zip(planned, plain, differences, strict=True), start=1):
        print(f"{index:>4}  {a:>11.6f}  {b:>11.6f}  {difference:>19.1e}")
    worst = max(differences)
    agree, falls = worst <= TOLERANCE, planned[-1] < planned[0] and plain[-1] < plain[0]
    print(f"\nlargest relative difference {worst:.1e} ({'within' if agree else 'ABOVE'} {TOLERANCE:.0e})")
    print(f"loss {planned[0]:.3f} -> {planned[-1]:.3f}: {'falls' if falls else 'DOES NOT FALL'}")
    return agree and falls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan, train, and compare with one process.")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for plan.json, report.md, report.html")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    run = Run(steps=given.steps, seed=given.seed)
    given.out.mkdir(parents=True, exist_ok=True)

    started = time.perf_counter()
    try:
        document, cluster = make_plan(run)
    except AutoplanError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(report_text(document))
    require_that_ddp_does_not_fit(document)
    document.save(given.out / "plan.json")
    (given.out / "report.md").write_text(report_markdown(document), encoding="utf-8")
    (given.out / "report.html").write_text(report_html(document), encoding="utf-8")
    seconds = time.perf_counter() - started
    print(f"planned in {seconds:.1f} s; wrote plan.json, report.md and report.html to {given.out.resolve()}\n")

    started = time.perf_counter()
    losses = launch(train_by_plan, RANKS, document.to_json(), cluster.to_dict(), run)
    print(f"trained {run.steps} steps on {RANKS} ranks in {time.perf_counter() - started:.1f} s, start included")
    if len({tuple(curve) for curve in losses.values()}) != 1:
        print("demo: the ranks report different losses", file=sys.stderr)
        return 1
    started = time.perf_counter()
    plain = train_plainly(run)
    print(f"trained {run.steps} steps on one process in {time.perf_counter() - started:.1f} s\n")
    return 0 if compare(losses[0], plain) else 1


if __name__ == "__main__":
    raise SystemExit(main())
