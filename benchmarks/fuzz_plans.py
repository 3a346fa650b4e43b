"""Random models under random legal plans, against plain eager training.

    python -m benchmarks.fuzz_plans --seed 1 --count 2000
    python -m benchmarks.fuzz_plans --repeat '{"blocks": …}'        # one case, as a failure prints it

A model is a stack of blocks from a small grammar, of awkward sizes; a plan any legal choice for every op on up to eight
ranks, with any ZeRO stage, recompute and cuts. All ranks of a plan run in this process (``rewrite.interpret``: a thread
for each, whose collectives meet), and one plan in ``PROCESSES`` on real processes over gloo as well. Losses and every
gradient must be those of the eager model, in float64. A failure is made smaller as long as it still fails, then printed
with the command that repeats it.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
import torch
import typer
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import Graph, Sizes, capture
from autoplan.capture.experts import OneGroupedProduct
from autoplan.capture.random import KEY, CountedRandom, random_key
from autoplan.cli.app import reported
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import PlanFileError, UserError
from autoplan.plans import Alternative, Degrees, Estimate, Plan, Proof, Strategy
from autoplan.rewrite import require_valid, rewrite
from autoplan.rewrite.interpret import coordinates, groups_of, interpret
from autoplan.sharding.rows import row_mixing
from benchmarks.random_plans import Chooser, make_plan
from benchmarks.testbed import Testbed, TestbedSpec
from benchmarks.zoo import SMALL, Alone, difference, run_plans

TOLERANCE = 1e-9
MOST_RANKS = 8
PLANS_PER_MODEL = 4
PROCESSES = 100  # one plan in so many runs on real processes too, if it has at most ``MOST_PROCESSES`` ranks
MOST_PROCESSES = 4
ATTEMPTS = 5

Mode = Literal["random", "greedy"]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model and one plan. ``zero`` and ``recompute``: of each layer in turn, repeated as often as needed."""

    blocks: tuple[str, ...]
    width: int
    heads: int
    vocabulary: int
    tied: bool
    loss: Literal["tokens", "mean"]
    seq: int
    rows: int  # of each data rank
    weights: int = 0  # seed
    pipe: int = 1
    data: int = 1
    tensor: int = 1
    mode: Mode = "random"
    boundary: str = "R"
    choices: int = 0  # seed
    zero: tuple[int, ...] = (0,)
    recompute: tuple[bool, ...] = (False,)
    cuts: int = 0  # seed
    split: bool = False  # backward

    @property
    def model(self) -> Case:
        """The same model under no plan: what a capture depends on."""
        return structs.replace(
            self, pipe=1, data=1, tensor=1, mode="random", boundary="R", choices=0, zero=(0,), recompute=(False,),
            cuts=0, split=False,
        )  # fmt: skip

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


# -- models


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal, self.size = heads, groups, causal, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.groups, self.size)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups < self.heads)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width // 2
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class _Conv(nn.Module):
    """Along the sequence, channels in groups or together."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class _Experts(nn.Module):
    """Each token to the best of four, all tokens of the batch in one grouped product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best, who = self.router(flat).softmax(-1).max(-1)
        order = who.argsort()
        offs = torch.histc(who[order].to(x.dtype), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        made = F.grouped_mm(flat[order], self.weight, offs=offs)
        back = torch.zeros_like(made).index_copy(0, order, made)
        result: Tensor = (back * best.unsqueeze(-1)).view_as(x)
        return result


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Scaled(nn.Module):
    """By a buffer, and by a parameter that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift  # type: ignore[operator]


BLOCKS: Mapping[str, Callable[[Case], nn.Module]] = {
    "linear": lambda c: nn.Sequential(nn.Linear(c.width, c.width), nn.Tanh()),
    "mlp": lambda c: nn.Sequential(nn.Linear(c.width, 2 * c.width), nn.GELU(), nn.Linear(2 * c.width, c.width)),
    "narrow": lambda c: nn.Sequential(nn.Linear(c.width, 5), nn.ReLU(), nn.Linear(5, c.width, bias=False)),
    "gated": lambda c: _Gated(c.width),
    "attention": lambda c: _Attention(c.width, c.heads, c.heads, causal=False),
    "causal": lambda c: _Attention(c.width, c.heads, c.heads, causal=True),
    "grouped": lambda c: _Attention(c.width, c.heads, 1, causal=True),
    "norm": lambda c: nn.LayerNorm(c.width),
    "rms": lambda c: nn.RMSNorm(c.width),
    "group norm": lambda c: _Function(lambda x: F.group_norm(x.transpose(1, 2), c.heads).transpose(1, 2)),
    "dropout": lambda c: nn.Dropout(0.25),
    "conv": lambda c: _Conv(c.width, 1),
    "depthwise": lambda c: _Conv(c.width, c.width),
    "softmax": lambda c: _Function(lambda x: x * x.softmax(-1)),
    "cumulative": lambda c: _Function(lambda x: x.cumsum(1) / x.shape[1]),
    "sorted": lambda c: _Function(lambda x: x.sort(-1).values),
    "rolled": lambda c: _Function(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1)),
    "pooled": lambda c: _Function(lambda x: x + x.mean(1, keepdim=True)),
    "scaled": lambda c: _Scaled(c.width),
    "experts": lambda c: _Experts(c.width),
}


class Model(nn.Module):
    """Tokens, blocks (those in "skip" form add their input), a head, a loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.loss = case.loss
        self.embed = nn.Embedding(case.vocabulary, case.width)
        self.names = [name.removesuffix("+") for name in case.blocks]
        self.skips = [name.endswith("+") for name in case.blocks]
        self.blocks = nn.ModuleList(BLOCKS[name](case) for name in self.names)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = x + block(x) if skip else block(x)
        logits = self.head(x)
        if self.loss == "mean":
            squared: Tensor = (logits - F.one_hot(labels, logits.shape[-1])).square().mean()
            return squared
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.weights)
    shape = (case.rows * case.data, case.seq)
    return {name: torch.randint(0, case.vocabulary, shape, generator=generator) for name in ("ids", "labels")}


@cache
def captured(model: Case) -> tuple[nn.Module, Graph, str | None]:
    """The module in float64, its graph, and why its rows cannot be spread, if they cannot."""
    torch.manual_seed(model.weights)
    module = Model(model).double()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.1 * torch.randn(param.shape, dtype=torch.float64))
    graph = capture(module, batch(structs.replace(model, rows=max(model.rows, 2))))
    return module, graph, row_mixing(graph, model.seq)


# -- one case


def fitted(case: Case) -> Case:
    """The case with what its model cannot have left out: more stages than layers, rows that mix spread over ranks."""
    _, graph, mixing = captured(case.model)
    return structs.replace(case, pipe=min(case.pipe, len(graph.layers)), data=1 if mixing else case.data)


def plan_of(case: Case, graph: Graph) -> Plan:
    """The first of a few draws that is legal: layers of two classes may share a parameter, and a draw for each class
    may place it in two ways. All replicated where none is."""
    sizes = Sizes(batch=case.rows, seq=case.seq)
    for attempt in range(ATTEMPTS if case.tensor > 1 else 0):
        seed = case.choices + attempt
        strategies = Chooser(graph, sizes, case.tensor, case.mode, seed, case.boundary).strategies()
        plan = _with(case, graph, strategies)
        with suppress(PlanFileError):
            require_valid(graph, plan)
            return plan
    return _with(case, graph, None)


def _with(case: Case, graph: Graph, strategies: Mapping[str, Strategy] | None) -> Plan:
    degrees = Degrees(pipe=case.pipe, data=case.data, tensor=case.tensor)
    count = len(graph.layers)
    zero = [case.zero[i % len(case.zero)] for i in range(count)]
    for param in graph.params:  # layers that share a parameter must treat it alike
        users = [layer.index for layer in graph.layers if param.name in layer.params]
        for index in users[1:]:
            zero[index] = zero[users[0]]
    starts = sorted(random.Random(case.cuts).sample(range(1, count), case.pipe - 1))
    return make_plan(
        graph,
        degrees,
        case.seq,
        strategies,
        rows=case.rows,
        zero=zero,
        recompute=["full" if case.recompute[i % len(case.recompute)] else "none" for i in range(count)],
        cuts=(0, *starts),
        split=case.split,
    )


def alone(case: Case, module: nn.Module) -> Alone:
    """The eager model on the whole batch."""
    whole = batch(case)
    with CountedRandom(random_key(0, 0, 0), case.rows * case.data), OneGroupedProduct():
        loss = module(**whole)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return Alone(loss=float(loss.detach()), untouched_loss=0.0, gradients=gradients, buffers={})


def mismatch(case: Case, *, processes: bool = False) -> str | None:
    """What is not as in eager training; None if all is. Whatever is raised is a mismatch too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, graph, _ = captured(case.model)
            expected = alone(case, module)
            plan = plan_of(case, graph)
            found = _interpreted(case, module, graph, plan, expected)
            if found is None and processes:
                found = _on_processes(case, module, graph, plan, expected)
    except Exception as error:  # noqa: BLE001 - a plan that cannot be rewritten or run is what is looked for
        return f"{type(error).__name__}: {error}"
    return found


def _interpreted(case: Case, module: nn.Module, graph: Graph, plan: Plan, expected: Alone) -> str | None:
    whole, rows = batch(case), case.rows
    batches = [
        [
            random_key(0, 0, d * rows) if i.path == KEY else whole[i.path][d * rows : (d + 1) * rows]
            for i in graph.inputs
        ]
        for d in range(case.data)
    ]
    programs = {at: rewrite(graph, plan, at, groups_of(at, plan.degrees)) for at in coordinates(plan.degrees)}
    params = {name: p.detach() for name, p in module.named_parameters()}
    found = interpret(programs, plan.degrees, params, batches, dict(module.named_buffers()))
    # Each rank's loss is a mean over as many tokens as another's.
    loss = float(sum(float(each) for each in found.losses)) / case.data
    gradients = {name: gradient / case.data for name, gradient in found.gradients.items()}
    return _compared(loss, gradients, expected)


def _compared(loss: float, gradients: Mapping[str, Tensor], expected: Alone) -> str | None:
    if not abs(loss - expected.loss) <= TOLERANCE * max(abs(expected.loss), SMALL):
        return f"the loss is {loss!r}, eagerly {expected.loss!r}"
    if gradients.keys() != expected.gradients.keys():
        return f"gradients of {sorted(gradients.keys() ^ expected.gradients.keys())} are on one side only"
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in gradients.items():
        off = difference(gradient, expected.gradients[name], SMALL * largest)
        if not off <= TOLERANCE:
            return f"the gradient of {name} is off by {off:.1e}"
    return None


def _on_processes(case: Case, module: nn.Module, graph: Graph, plan: Plan, expected: Alone) -> str | None:
    """The same plan by the runtime, on real ranks."""
    estimate = Estimate(
        step_us=1.0, compute_us=1.0, exposed_tensor_us=0.0, exposed_data_us=0.0, pipeline_send_us=0.0, bubble_us=0.0,
        optimizer_us=0.0, memory=(), device_memory_bytes=0, fits=True, proof=Proof(status="priced"),
    )  # fmt: skip
    alternative = Alternative(plan=plan, estimate=estimate)
    torch.set_num_threads(1)
    with Testbed(TestbedSpec(cluster=Cluster.local(devices=plan.degrees.size)), shaped=False) as bed:
        outcomes = bed.fork(run_plans, (graph, module, batch(case), expected, [alternative]), timeout_s=120.0)
    for outcome in outcomes:
        if outcome.status not in ("ok", "stopped"):
            return f"on processes, rank {outcome.rank}, {outcome.status}: {(outcome.error or '').strip()[-300:]}"
    (worst,) = outcomes[0].value
    wrong = {what: off for what, off in worst.items() if not off <= TOLERANCE}
    return f"on processes: {wrong}" if wrong else None


# -- many


def drawn(seed: int, number: int) -> Case:
    """The case of a number: its model is shared with its neighbours, its plan is its own."""
    of_model = random.Random(f"model {seed} {number // PLANS_PER_MODEL}")
    of_plan = random.Random(f"plan {seed} {number}")
    heads = of_model.choice((1, 2, 3, 4))
    names = [of_model.choice(list(BLOCKS)) + of_model.choice(("", "+", "+")) for _ in range(of_model.randint(1, 4))]
    if of_model.random() < 0.4:
        names *= of_model.randint(2, 3)  # layers that repeat
    degrees = of_plan.choice(
        [(p, d, t) for p in (1, 2, 3, 4) for d in (1, 2, 3, 4) for t in (1, 2, 3, 4) if 1 < p * d * t <= MOST_RANKS]
    )
    return Case(
        blocks=tuple(names),
        width=heads * of_model.choice((4, 6, 8)),
        heads=heads,
        vocabulary=of_model.choice((10, 12, 17)),
        tied=of_model.random() < 0.3,
        loss=of_model.choice(("tokens", "tokens", "mean")),
        seq=of_model.choice((4, 6, 7)),
        rows=of_model.choice((1, 2, 3)),
        weights=of_model.randint(0, 1000),
        pipe=degrees[0],
        data=degrees[1],
        tensor=degrees[2],
        mode=of_plan.choice(("random", "random", "greedy")),
        boundary=of_plan.choice(("R", "S0", "S1", "S2")),
        choices=of_plan.randint(0, 1_000_000),
        zero=tuple(of_plan.choice((0, 1, 2, 3)) for _ in range(of_plan.randint(1, 4))),
        recompute=tuple(of_plan.random() < 0.4 for _ in range(of_plan.randint(1, 3))),
        cuts=of_plan.randint(0, 1000),
        split=degrees[0] > 1 and of_plan.random() < 0.5,
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are less than this one, by one thing each."""
    for at in range(len(case.blocks)):
        if len(case.blocks) > 1:
            yield structs.replace(case, blocks=case.blocks[:at] + case.blocks[at + 1 :])
    changes: list[dict[str, Any]] = [{"pipe": 1}, {"data": 1}, {"tensor": 1}, {"data": 2}, {"tensor": 2}]
    changes += [{"zero": (0,)}, {"recompute": (False,)}, {"tied": False}, {"rows": 1}, {"split": False}]
    changes += [{"zero": (stage,)} for stage in sorted(set(case.zero)) if len(case.zero) > 1]
    changes += [{"mode": "greedy"}, {"boundary": "R"}]
    for change in changes:
        less = structs.replace(case, **change)
        if less != case and all(getattr(less, name) <= getattr(case, name) for name in ("pipe", "data", "tensor")):
            yield less


def shrunk(case: Case, *, processes: bool) -> tuple[Case, str]:
    """The smallest case that still fails that was found, and how it fails."""
    said = mismatch(case, processes=processes) or ""
    progress = True
    while progress:
        progress = False
        for less in smaller(case):
            with suppress(UserError):
                less = fitted(less)
            found = mismatch(less, processes=processes)
            if found is not None and less != case:
                case, said, progress = less, found, True
                break
    return case, said


def fuzz(seed: int, count: int, tell: Callable[[str], None] = lambda text: None) -> tuple[Case, str] | None:
    """The first failure of ``count`` cases, made small, and what is wrong; None if there is none."""
    started = time.monotonic()
    for number in range(count):
        case = fitted(drawn(seed, number))
        processes = number % PROCESSES == PROCESSES - 1 and case.pipe * case.data * case.tensor <= MOST_PROCESSES
        if mismatch(case, processes=processes) is not None:
            tell(f"case {number} of seed {seed} fails; looking for a smaller one")
            return shrunk(case, processes=processes)
        if number % PLANS_PER_MODEL == PLANS_PER_MODEL - 1:
            captured.cache_clear()
        if (number + 1) % 100 == 0:
            tell(f"{number + 1} plans, {time.monotonic() - started:.0f} s")
    return None


@app.command()
@reported
def main(
    seed: Annotated[int, typer.Option("--seed")] = 0,
    count: Annotated[int, typer.Option("--count", min=1, help="How many plans.")] = 2000,
    repeat: Annotated[str, typer.Option("--repeat", help="A case, as a failure prints it.")] = "",
) -> None:
    """Look for a model and a plan under which training differs from eager training."""
    if repeat:
        try:
            case = msgspec.json.decode(repeat, type=Case)
        except msgspec.MsgspecError as error:
            raise UserError(f"--repeat is no case: {error}; give it as a failure printed it") from None
        failure = (case, said) if (said := mismatch(case)) is not None else None
        count = 1
    else:
        failure = fuzz(seed, count, typer.echo)
    if failure is None:
        typer.echo(f"{count} plans, and every one trains as the eager model does")
        return
    case, said = failure
    typer.echo(f"{said}\n{case}\nrepeat it: python -m benchmarks.fuzz_plans --repeat '{case}'")
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
