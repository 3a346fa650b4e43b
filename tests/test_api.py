"""What a user types: plan, compile, and a script of their own under torchrun."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config

import autoplan
from autoplan import api
from autoplan.capture import Graph, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import BatchError, DegreeError, FingerprintError, ModelError, PlanFileError, UserError
from autoplan.plans import Plan, PlanDocument
from autoplan.runtime.params import module_source
from autoplan.search.explain import describe
from benchmarks import demo
from tests.one_process import Training, differences, in_float64, train

ROWS, TOKENS = 8, 16


def gpt2(layers: int = 2, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=4,
        vocab_size=64,
        n_positions=TOKENS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def batch(step: int = 0, mask: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[1, 4:] = -100
    made = {"input_ids": ids, "labels": labels}
    if mask:
        made["attention_mask"] = torch.ones_like(ids)
        made["attention_mask"][1, 4:] = 0
    return made


class Perceptron(nn.Module):
    """Not a transformer: unequal widths, a frozen layer, a buffer, and no loss of its own."""

    def __init__(self, hidden: int = 20) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.register_buffer("scale", torch.full((12,), 0.5))
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.layers(self.frozen(x * self.scale))


def squared_error(output: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (output - given["target"]).square().mean()


def regression(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(ROWS, 12, generator=generator),
        "target": torch.randn(ROWS, 3, generator=generator),
    }


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, autoplan
from tests.test_api import batch, gpt2
step = autoplan.compile(gpt2(), autoplan.Cluster.local(devices=2))
losses = [float(step(batch(i, mask=True))) for i in range(3)]
if torch.distributed.get_rank() == 0:
    print("LOSSES", json.dumps(losses), step.plan.plan.degrees.size)
"""


@pytest.mark.processes
def test_a_users_script_under_torchrun(tmp_path: Path) -> None:
    """Two arguments, the default optimizer, padded rows, and a process group that nobody but autoplan sets up."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        root,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("LOSSES"))
    losses = json.loads(line.removeprefix("LOSSES ").rsplit(" ", 1)[0])
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for i in range(3):
        optimizer.zero_grad()
        loss = model(**batch(i, mask=True)).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*loss_type.*")
def test_one_process_needs_no_launcher() -> None:
    model = Perceptron()
    reference = Perceptron()
    with autoplan.compile(
        model, Cluster.local(devices=1), loss_fn=squared_error, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ) as step:
        optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
        for i in range(4):
            given = regression(i)
            loss = squared_error(reference(**given), given)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(step(given)) == pytest.approx(float(loss.detach()), rel=1e-5)
        after = step.state_dict()
        placed = {name: value.full_tensor() for name, value in step.named_parameters() if isinstance(value, DTensor)}
    assert not dist.is_initialized()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(after[name], value.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(placed[name], after[name], rtol=0, atol=0)


def test_another_shape_of_batch_is_refused() -> None:
    with autoplan.compile(Perceptron(), Cluster.local(devices=1), loss_fn=squared_error) as step:
        step(regression(0))
        shorter = {name: value[:-2] for name, value in regression(1).items()}
        with pytest.raises(BatchError, match=r"not like the one that was compiled for: 'target' is .*'x' is"):
            step(shorter)


# So wide that two ranks gain by sharing the work. In the memory, one could not hold it with its optimizer (6.1 MB).
HIDDEN, MEMORY_BYTES = 20_000, 5_200_000


def _perceptron_ranks(rank: int, world: int, degrees: dict[str, int], memory_bytes: int | None) -> None:
    def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-5)

    step = autoplan.compile(
        Perceptron(HIDDEN),
        Cluster.local(devices=world, memory_bytes=memory_bytes),
        loss_fn=squared_error,
        pins=autoplan.Pins(**degrees),
        optimizer=adamw,
        clip_norm=0.5,
    )
    reference = Perceptron(HIDDEN)
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = adamw(trained)
    for i in range(3):
        given = regression(i)
        loss = squared_error(reference(**given), given)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        assert float(step(given)) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert step.plan is not None
    assert all(getattr(step.plan.plan.degrees, k) == v for k, v in degrees.items() if k in ("data", "tensor", "pipe"))
    held = {h.spec.name: h for h in step._ready().store.params}
    for name, width in (("layers.0.weight", 12), ("layers.2.weight", 6)):
        assert held[name].value.numel() == width * HIDDEN // 2, f"{name} is not cut"
        assert held[name].spec.tensor.kind == ("S" if "tensor" in degrees else "R")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("degrees", "memory_bytes"), [({"data": 2, "zero": 3}, None), ({"tensor": 2}, MEMORY_BYTES)], ids=["zero", "tensor"]
)
def test_a_model_that_is_no_transformer(
    run_ranks: Callable[..., None], degrees: dict[str, int], memory_bytes: int | None
) -> None:
    """And its large weights are really cut in two."""
    run_ranks(_perceptron_ranks, 2, degrees, memory_bytes)


def _bf16_ranks(rank: int, world: int) -> None:
    step = autoplan.compile(gpt2(), Cluster.local(devices=world), precision="bf16", pins=autoplan.Pins(data=2, zero=2))
    reference = gpt2()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    first, last = 0.0, 0.0
    for _ in range(8):
        loss = reference(**batch(0)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(step(batch(0)))
        first = first or last
        # bfloat16 keeps 8 bits; float32 masters keep the two runs together over the steps
        assert last == pytest.approx(float(loss.detach()), rel=2e-2)
    assert last < first
    masters = [m for _, m in step._ready().store.trainable]
    assert all(m.dtype == torch.float32 for m in masters)
    assert all(v.dtype == torch.bfloat16 for v in step._ready().store.values)


@pytest.mark.processes
def test_bf16_with_float32_masters(run_ranks: Callable[..., None]) -> None:
    run_ranks(_bf16_ranks, 2)


DEMO = demo.Run(steps=3, seed=0)
TOP, SAMPLE = 20, 5


def prepare_demo() -> tuple[Graph, nn.Module, Training]:
    """The demo's model in float64: what its ranks would capture, and what one process does."""
    batches = list(demo.batches(DEMO))
    graph = in_float64(capture(demo.build(DEMO.seed), batches[0], precision=torch.float32, finely=True))
    model = demo.build(DEMO.seed).double()
    return graph, model, train(deepcopy(model), batches, optimizer=demo.adamw, clip_norm=demo.CLIP_NORM)


def _run_ranked(rank: int, world: int, prepared: tuple[Graph, nn.Module, Training], texts: list[str]) -> None:
    graph, model, one = prepared
    for text in texts:
        document = PlanDocument.from_json(text)
        source, device = module_source(model), torch.device("cpu")
        step = api.build_step(graph, document, source, device, 60.0, demo.adamw, demo.CLIP_NORM)
        found = differences(step, one)
        assert max(found.values()) <= 1e-9, f"{describe(document.plan)} differs from one process: {found}"
        step.axes.close()


def spread(plans: list[Plan], count: int) -> list[Plan]:
    """The first, and a sample of the others: plans of every degrees before there are two of any."""
    first, *others = plans
    seen = Counter([str(first.degrees)])
    ordered = []
    for plan in random.Random(1).sample(others, len(others)):
        ordered.append((seen[str(plan.degrees)], plan))
        seen[str(plan.degrees)] += 1
    return [first, *(plan for _, plan in sorted(ordered, key=lambda pair: pair[0])[: count - 1])]


@pytest.mark.processes
@pytest.mark.slow  # the demo's own model, planned for and run: that what is ranked runs is the promise of a search
@pytest.mark.timeout(300)
def test_what_the_search_ranks_runs(run_ranks: Callable[..., None]) -> None:
    """The demo's pick and a sample of what else is in its top 20, every decision as it was made for float32, on
    float64: losses, gradients, clip norm and parameters of one process."""
    document, _ = demo.make_plan(DEMO)
    ranked = [document.plan, *(alternative.plan for alternative in document.runners_up)][:TOP]
    assert len({structs.replace(plan, name="") for plan in ranked}) == TOP
    sample = spread(ranked, SAMPLE)
    assert len({str(plan.degrees) for plan in sample}) >= 4
    texts = [structs.replace(document, plan=plan).to_json() for plan in sample]
    run_ranks(_run_ranked, demo.RANKS, texts, prepare=prepare_demo)


def test_a_plan_for_something_else_is_refused() -> None:
    cluster = Cluster.local(devices=1)
    document = autoplan.plan(gpt2(), cluster, batch())
    with (
        autoplan.compile(gpt2(3), cluster, plan=document) as step,
        pytest.raises(FingerprintError, match=r"made for something else. model: the plan has"),
    ):
        step(batch())


def test_a_plan_that_names_what_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """As a document and as a file, of which every word is valid JSON. What else is looked up: tests/rewrite."""
    cluster = Cluster.local(devices=1)
    document = autoplan.plan(gpt2(), cluster, batch())
    strategy = document.plan.strategy(1)
    bogus = [
        structs.replace(strategy, choices=("bogus", *strategy.choices[1:])),
        structs.replace(strategy, params=("bogus", *strategy.params[1:])),
    ]
    plans = [
        structs.replace(document.plan, strategies=tuple(b if s is strategy else s for s in document.plan.strategies))
        for b in bogus
    ]
    wrong, in_file = (structs.replace(document, plan=plan) for plan in plans)
    in_file.save(tmp_path / "plan.json")
    for given, words in ((wrong, "has 'bogus' for .*it has"), (tmp_path / "plan.json", "as 'bogus'; .* it may be R")):
        with (
            autoplan.compile(gpt2(), cluster, plan=given) as step,
            pytest.raises(PlanFileError, match=f"strategy '{strategy.key}' .*{words}"),
        ):
            step(batch())


def test_ranks_must_be_as_many_as_devices() -> None:
    with (
        autoplan.compile(gpt2(), Cluster.local(devices=4)) as step,
        pytest.raises(UserError, match=r"1 rank\(s\) are running.*torchrun --nproc-per-node 4"),
    ):
        step(batch())


def test_dropout_depends_on_seed_and_step_alone() -> None:
    cluster = Cluster.local(devices=1)

    def losses(**options: Any) -> list[float]:
        with autoplan.compile(gpt2(dropout=0.3), cluster, **options) as step:
            return [float(step(batch())) for _ in range(3)]

    whole, parts = (losses(seed=1, pins=autoplan.Pins(micro_batch=size)) for size in (ROWS, 1))
    assert parts == pytest.approx(whole, rel=1e-5)
    assert losses(seed=2) != pytest.approx(whole, rel=1e-3)


def test_draws_that_would_differ_between_plans_are_refused_when_run() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return squared_error(self.last(self.first(x)[:, torch.randperm(8)]), {"target": target})

    cluster, rows = Cluster.local(devices=1), {"x": torch.randn(4, 12), "target": torch.randn(4, 3)}
    assert any("randperm" in note for note in autoplan.plan(Shuffled(), cluster, rows).notes)
    with autoplan.compile(Shuffled(), cluster) as step, pytest.raises(ModelError, match="randperm"):
        step(rows)


def test_parameters_of_mixed_types_need_a_precision() -> None:
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(ModelError, match=r"float32 and float64.*say precision"):
        autoplan.plan(mixed, Cluster.local(devices=1), torch.randn(4, 4))


def test_ops_that_no_rule_shards_are_listed() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            counts = torch.histc(self.first(x).detach(), 4)
            return squared_error(self.last(self.first(x)) * counts.sum(), {"target": target})

    notes = autoplan.plan(Sorted(), Cluster.local(devices=2), regression()).notes
    assert any("1 op is priced as replicated" in note and "aten.histc" in note for note in notes)
    plain = autoplan.plan(
        nn.Linear(4, 4), Cluster.local(devices=2), torch.randn(4, 4), loss_fn=lambda out, _: out.square().mean()
    )
    assert not any("priced as replicated" in note for note in plain.notes)


def test_rows_that_mix_keep_the_batch_whole() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)
            self.norm = nn.BatchNorm1d(8, track_running_stats=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return squared_error(self.last(self.norm(self.first(x))), {"target": target})

    document = autoplan.plan(Normed(), Cluster.local(devices=2), regression())
    assert document.plan.degrees.data == 1
    assert document.plan.micro_batches == 1
    assert any("mixes the rows" in note for note in document.notes)
    with pytest.raises(ModelError, match="mixes the rows"):
        autoplan.plan(Normed(), Cluster.local(devices=2), regression(), pins=autoplan.Pins(data=2))


def test_a_degree_that_heads_do_not_divide() -> None:
    """GPT-2 with 4 heads: tensor 8 would cut a head in two."""
    with pytest.raises(DegreeError, match=r"4 attention heads.*use one of 1, 2, 4"):
        autoplan.plan(gpt2(), Cluster.local(devices=8), batch(), pins=autoplan.Pins(tensor=8))


def test_fused_products_are_the_callers_decision() -> None:
    cluster = Cluster.local(devices=4)
    pinned = autoplan.plan(gpt2(), cluster, batch(), pins=autoplan.Pins(tensor=2, fused_matmul=True))
    assert pinned.plan.fused_matmul
    assert not autoplan.plan(gpt2(), cluster, batch(), pins=autoplan.Pins(tensor=2)).plan.fused_matmul


def test_the_report_is_text() -> None:
    document = autoplan.plan(gpt2(), "1x4xa100-40gb-sxm", batch())
    assert "Why this plan" in document.report()


def test_names_are_what_all_says() -> None:
    for name in autoplan.__all__:
        assert getattr(autoplan, name) is not None
    assert callable(autoplan.plan)
    from autoplan.plans import Plan

    assert Plan is not None
    assert callable(autoplan.plan), "importing a submodule must not replace the function"
