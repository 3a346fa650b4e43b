"""Every architecture of ``benchmarks.architectures`` captured, planned and run, against one process.

    python -m benchmarks.zoo                        # all of them, and docs/zoo.md
    python -m benchmarks.zoo --only gpt2,unet       # some, printed alone

Of each: does it capture; is there a plan on a line of devices, on a plane, and in stages; which share of its FLOPs has
a rule that shards; and do its best plan and random ones give what one process gives: loss, every gradient, every
buffer, in float64 on real ranks. Casts to float32 inside the models are promoted on both sides; the untouched model is
held to 1e-5. A model that draws random numbers draws autoplan's own on both sides.
"""

from __future__ import annotations

import random
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from autoplan.api import build_step
from autoplan.capture import Graph, Sizes, capture
from autoplan.capture.experts import OneGroupedProduct
from autoplan.capture.random import CountedRandom, random_key
from autoplan.capture.trace import Promote, batch_seq, call_arguments, find_loss
from autoplan.cli.app import reported
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import AutoplanError, DegreeError
from autoplan.plans import SCHEMA_VERSION, Alternative, PlanDocument
from autoplan.runtime.params import module_source
from autoplan.search.planner import Effort, Problem, problem_of, solve_problem
from autoplan.search.pricing import GraphPrices
from autoplan.search.space import Pins
from autoplan.sharding import rule_for
from autoplan.sharding.rows import row_mixing
from benchmarks.architectures import ROWS, Architecture, Batch, architectures
from benchmarks.compare.candidates import samples, signature
from benchmarks.compare.planning import remembering
from benchmarks.testbed import Seat, Testbed, TestbedSpec

RANKS, RANDOM_PLANS = 4, 3
EFFORT = Effort(hand_plans=False)
TOLERANCE, EAGER_TOLERANCE = 1e-9, 1e-5
SMALL = 1e-6  # of the largest gradient: what is smaller is compared with that, being rounding alone in many a model
TIMEOUT_S = 300.0
TABLE = Path("docs/zoo.md")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What one process does with the batch, in float64 with casts promoted; and the loss of the untouched model."""

    loss: float
    untouched_loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(kw_only=True)
class Finding:
    """What was found of one architecture; ``wrong`` says what is not as it should be."""

    name: str
    library: str
    parameters: int = 0
    layers: int = 0
    classes: int = 0
    share: float = 0.0  # of FLOPs under a rule that shards
    meshes: dict[str, str] = field(default_factory=dict)  # name -> the plan found there
    plans: dict[str, float] = field(default_factory=dict)  # signature -> largest difference from one process
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@app.command()
@reported
def main(
    only: Annotated[str, typer.Option("--only", help="Names, with commas; all.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the random plans.")] = 0,
) -> None:
    """Try autoplan on many architectures, and write docs/zoo.md where all of them were tried."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    findings = []
    for architecture in architectures(names):
        findings.append(examine(architecture, seed))
        typer.echo(told(findings[-1]))
    wrong = [finding for finding in findings if finding.wrong]
    typer.echo(f"{len(findings) - len(wrong)} of {len(findings)} architectures are as one process has them")
    if not names:
        TABLE.write_text(table(findings), encoding="utf-8")
        typer.echo(f"wrote {TABLE}")
    if wrong:
        raise typer.Exit(1)


def examine(architecture: Architecture, seed: int) -> Finding:
    """Everything about one architecture. Whatever is raised on the way is something wrong with it."""
    started = time.monotonic()
    found = Finding(name=architecture.name, library=architecture.library)
    torch.set_num_threads(1)  # ranks are forked from here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _examine(architecture, seed, found)
    except Exception as error:  # noqa: BLE001 - the others are to be examined all the same
        known = isinstance(error, AutoplanError)
        where = "" if known else f" at {traceback.extract_tb(error.__traceback__)[-1]}"
        found.wrong.append(f"{type(error).__name__}: {error}{where}")
    found.seconds = time.monotonic() - started
    return found


def _examine(architecture: Architecture, seed: int, found: Finding) -> None:
    module, batch = in_float64(architecture)
    found.parameters = sum(param.numel() for param in module.parameters())
    graph = capture(module, batch, architecture.loss_fn, promote=True, finely=True)
    found.layers, found.classes = len(graph.layers), len(set(graph.depth))
    seq = batch_seq(batch) or 1
    found.share = sharded_share(graph, Sizes(batch=ROWS, seq=seq))
    alone = run_alone(architecture, module, batch)
    if not close(alone.untouched_loss, alone.loss, EAGER_TOLERANCE):
        found.wrong.append(f"promoted casts change the loss from {alone.untouched_loss} to {alone.loss}")
    problem = remembering(
        problem_of(
            graph,
            Cluster.local(devices=RANKS),
            global_batch=ROWS,
            seq=seq,
            precision="fp64",
            model_name=architecture.name,
        )
    )
    base = Pins() if row_mixing(graph, seq) is None else Pins(data=1, micro_batch=ROWS)
    alternatives = chosen(problem, base, found, random.Random(f"{seed} {architecture.name}"))
    with Testbed(TestbedSpec(cluster=Cluster.local(devices=RANKS)), shaped=False) as bed:
        outcomes = bed.fork(run_plans, (graph, module, batch, alone, alternatives), timeout_s=TIMEOUT_S)
    for outcome in outcomes:
        if outcome.status not in ("ok", "stopped"):
            last = (outcome.error or "no message").strip().splitlines()[-1]
            found.wrong.append(f"rank {outcome.rank}, {outcome.status}: {last}")
    if outcomes[0].status == "ok":
        for alternative, worst in zip(alternatives, outcomes[0].value, strict=True):
            found.plans[signature(alternative.plan)] = max(worst.values())
            for what, difference in worst.items():
                if not difference <= TOLERANCE:
                    found.wrong.append(f"{what} off by {difference:.1e} under {signature(alternative.plan)}")


def in_float64(architecture: Architecture) -> tuple[nn.Module, Batch]:
    """The module and a batch, everything floating in float64."""
    module = architecture.module().double()
    for buffer in module.buffers():  # rotary frequencies, which no cast reaches where they are made again
        if buffer.dtype == torch.float32:
            buffer.data = buffer.data.double()
    torch.manual_seed(1)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in architecture.batch(ROWS).items()}
    return module, batch


def run_alone(architecture: Architecture, module: nn.Module, batch: Batch) -> Alone:
    """Eagerly, as anybody would; the module's buffers and gradients are left as they were."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    losses = {}
    gradients: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for promote in (False, True):
        with ExitStack() as stack:
            if promote:
                stack.enter_context(Promote())  # type: ignore[no-untyped-call]
            stack.enter_context(CountedRandom(random_key(0, 0, 0), ROWS))
            stack.enter_context(OneGroupedProduct())  # torch's own knows no float64
            args, kwargs = call_arguments(batch)
            loss = find_loss(module(*args, **kwargs), batch, architecture.loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        losses[promote] = float(loss.detach())
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        after = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.zero_grad()
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return Alone(loss=losses[True], untouched_loss=losses[False], gradients=gradients, buffers=after)


def sharded_share(graph: Graph, sizes: Sizes) -> float:
    """The share of all FLOPs in calls whose rule has a factor that some axis may shard."""
    total = sharded = 0.0
    for name, price in GraphPrices(graph).at(sizes).items():
        total += price.flops
        rule = rule_for(graph.node(name))
        if any(letter not in rule.fixed and sizes.value(size) > 1 for letter, size in rule.sizes.items()):
            sharded += price.flops
    return sharded / total if total else 0.0


def chosen(problem: Problem, base: Pins, found: Finding, generator: random.Random) -> list[Alternative]:
    """The best plan of all and of each kind of mesh, noted in ``found``, and random ones. What is run: the best of all
    and the random ones."""
    free, micro_batch = base.data is None, base.micro_batch
    kinds: dict[str, list[Pins]] = {
        "a line": [Pins(tensor=RANKS, data=1, pipe=1, micro_batch=micro_batch)],
        "a plane": [Pins(pipe=2, tensor=2, data=1, micro_batch=micro_batch)],
        "stages": [Pins(pipe=2, data=base.data, micro_batch=micro_batch)],
    }
    if free:  # heads that cannot be cut leave the data axis
        kinds["a line"].append(Pins(data=RANKS, tensor=1, pipe=1))
        kinds["a plane"] = [Pins(data=2, tensor=2), Pins(data=2, pipe=2, tensor=1)]
    for name, options in kinds.items():
        if problem.layers == 1 and all((pins.pipe or 1) > 1 for pins in options):
            found.meshes[name] = "one layer: cannot be cut"
            continue
        found.meshes[name] = first_possible(problem, options)
    document = solve_problem(problem, pins=base, effort=EFFORT)
    best = Alternative(plan=document.plan, estimate=document.estimate)
    drawn: Iterator[Alternative] = samples(problem, generator, limit_us=float("inf"), pins=base)
    seen = {signature(best.plan): best}
    for other in islice(drawn, 20 * RANDOM_PLANS):
        if len(seen) <= RANDOM_PLANS:
            seen.setdefault(signature(other.plan), other)
    return list(seen.values())


def first_possible(problem: Problem, options: Sequence[Pins]) -> str:
    """The degrees of the best plan under the first pins that the model allows. Raises DegreeError where none are."""
    *others, last = options
    for pins in others:
        try:
            return str(solve_problem(problem, pins=pins, effort=EFFORT).plan.degrees)
        except DegreeError:
            continue
    return str(solve_problem(problem, pins=last, effort=EFFORT).plan.degrees)


def run_plans(
    seat: Seat, argument: tuple[Graph, nn.Module, Batch, Alone, Sequence[Alternative]]
) -> list[dict[str, float]]:
    """In each rank: the largest difference of any rank from one process, by what differs, of each plan."""
    graph, module, batch, alone, alternatives = argument
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.master_address}:{seat.master_port}",
        rank=seat.rank,
        world_size=seat.world_size,
    )
    found = [run_plan(graph, module, batch, alone, alternative) for alternative in alternatives]
    dist.barrier()
    dist.destroy_process_group()
    return found


def run_plan(graph: Graph, module: nn.Module, batch: Batch, alone: Alone, alternative: Alternative) -> dict[str, float]:
    document = PlanDocument(schema_version=SCHEMA_VERSION, plan=alternative.plan, estimate=alternative.estimate)
    step = build_step(
        graph, document, module_source(module), torch.device("cpu"), TIMEOUT_S, partial(torch.optim.SGD, lr=1.0)
    )
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for held, master in step.store.trainable:
            if master.grad is not None:
                gradients[held.spec.name] = step.store.full_tensor(held, master.grad.detach()).clone()

    step.optimizer.register_step_pre_hook(keep)
    loss = float(step(dict(batch)))
    largest = max((float(g.abs().max()) for g in alone.gradients.values()), default=0.0)
    worst = {
        "loss": abs(loss - alone.loss) / max(abs(alone.loss), SMALL),
        "gradient": max(
            (difference(gradients[name], alone.gradients[name], SMALL * largest) for name in gradients), default=0.0
        ),
        "buffer": max(
            (
                difference(value, alone.buffers[name], SMALL)
                for name, value in zip(step.store.buffer_names, step.store.buffers, strict=True)
            ),
            default=0.0,
        ),
    }
    shared = torch.tensor([*worst.values(), 0.0], dtype=torch.float64)
    seen = torch.tensor([name in gradients for name in alone.gradients], dtype=torch.int64)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    if int(seen.sum()) < len(alone.gradients):
        shared[-1] = float("inf")  # some gradient that one process has is on no rank
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    step.axes.close()
    return dict(zip((*worst, "missing gradients"), shared.tolist(), strict=True))


def difference(actual: Tensor, expected: Tensor, least: float) -> float:
    """The largest, relative to the largest element expected or to ``least``; infinite where one is no number."""
    if not expected.numel():
        return 0.0
    wide = (t.detach().to(torch.float64) for t in (actual, expected))
    one, other = wide
    scale = max(float(other.abs().max()), least, 1e-300)
    off = float((one - other).abs().max()) / scale
    return off if off == off else float("inf")


def close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


def told(found: Finding) -> str:
    """One architecture in a line, and what is wrong in lines below."""
    worst = max(found.plans.values(), default=float("nan"))
    head = (
        f"{found.name:14s} {'wrong' if found.wrong else 'ok':5s} {found.layers:3d} layers, {found.classes} classes, "
        f"{found.share:6.1%} of FLOPs shard, {len(found.plans)} plans off by {worst:.1e} at most, {found.seconds:.0f} s"
    )
    return "\n".join([head, *(f"    {line}" for line in found.wrong)])


def table(findings: Sequence[Finding]) -> str:
    """docs/zoo.md."""
    lines = [
        "# The zoo",
        "",
        f"Small random configurations, {RANKS} ranks, float64, {ROWS} rows. Made by `python -m benchmarks.zoo`.",
        "*Off by*: the largest relative difference from one process in loss, gradients and buffers, over the best plan",
        f"and {RANDOM_PLANS} random ones.",
        "",
        "| architecture | from | parameters | layers (classes) | FLOPs that shard | a line | a plane | stages "
        "| off by |",
        "| --- | --- | --: | --: | --: | --- | --- | --- | --: |",
    ]
    for found in findings:
        cells = [
            found.name,
            found.library,
            f"{found.parameters:,}",
            f"{found.layers} ({found.classes})",
            f"{found.share:.1%}",
            *(found.meshes.get(name, "–") for name in ("a line", "a plane", "stages")),
            f"{max(found.plans.values()):.0e}" if found.plans and not found.wrong else "; ".join(found.wrong) or "–",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
