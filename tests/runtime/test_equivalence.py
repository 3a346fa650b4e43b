"""Every kind of plan computes what one process computes: losses, gradients, clip norm and parameters, float64, real
ranks.

One set of ranks runs every plan of every model for five steps and compares with the eager model, trained before the
ranks were forked. Casts to float32 inside the models (norms, rotary tables, the loss) are promoted to float64 on both
sides; the untouched model is held to 1e-5. Labels are ignored unevenly, so that a mean of micro-batch means would fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from autoplan.capture import Graph, Sizes, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import BatchError, LegalityError
from autoplan.plans import Degrees, Fingerprint, Plan, Recompute, Schedule
from autoplan.rewrite import Coordinate, check_priced, rewrite
from autoplan.runtime.executable import Executable
from autoplan.runtime.mesh import build_axes
from autoplan.runtime.params import ParamStore, module_source
from autoplan.runtime.step import TrainStep
from autoplan.search.fixed import fixed_plan
from autoplan.search.strategies import StrategyTables
from tests.one_process import Training, differences, relative, train

RANKS, ROWS, TOKENS, VOCABULARY, STEPS = 4, 8, 16, 96, 5
CLIP, RATE = 0.3, 1e-2
TOLERANCE, EAGER_TOLERANCE = 1e-9, 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan by hand. ``kinds``, ``zero`` and ``recompute`` for all layers, or one for each of the six."""

    degrees: Degrees
    micro_batch: int
    kinds: str | Sequence[str] = "replicated"
    zero: int | Sequence[int] = 0
    recompute: Recompute | Sequence[Recompute] = "none"
    schedule: Schedule = "1f1b"
    cuts: Sequence[int] | None = None
    layers: int = 4
    fused: bool = False
    split: bool = False  # backward

    @property
    def micro_batches(self) -> int:
        return ROWS // (self.degrees.data * self.micro_batch)


CASES: Mapping[str, Case] = {
    "DP4": Case(degrees=Degrees(data=4), micro_batch=1),
    "ZeRO-1": Case(degrees=Degrees(data=4), micro_batch=1, zero=1),
    "ZeRO-2": Case(degrees=Degrees(data=4), micro_batch=1, zero=2),
    "ZeRO-3": Case(degrees=Degrees(data=4), micro_batch=1, zero=3),
    "TP4": Case(degrees=Degrees(tensor=4), micro_batch=4, kinds="tensor"),
    "TP2 x DP2": Case(degrees=Degrees(tensor=2, data=2), micro_batch=2, kinds="tensor"),
    "PP4": Case(degrees=Degrees(pipe=4), micro_batch=2),
    "PP4 GPipe": Case(degrees=Degrees(pipe=4), micro_batch=2, schedule="gpipe"),
    "PP2 x TP2": Case(degrees=Degrees(pipe=2, tensor=2), micro_batch=2, kinds="tensor"),
    "PP2 x ZeRO-3 x 2": Case(degrees=Degrees(pipe=2, data=2), micro_batch=2, zero=3),
    "TP2 sequence x ZeRO-3": Case(degrees=Degrees(tensor=2, data=2), micro_batch=2, kinds="tensor+sequence", zero=3),
    "TP2 sequence, fused matmul": Case(
        degrees=Degrees(tensor=2, data=2), micro_batch=1, kinds="tensor+sequence", fused=True
    ),
    "mixed by layer": Case(
        degrees=Degrees(tensor=2, data=2),
        micro_batch=2,
        kinds=("tensor", "tensor", "replicated", "tensor+sequence", "batch", "tensor"),
        zero=(0, 1, 2, 3, 3, 0),
        recompute=("none", "full", "full", "none", "full", "none"),
    ),
    "PP2 x DP2, mixed ZeRO and recompute": Case(
        degrees=Degrees(pipe=2, data=2),
        micro_batch=1,
        zero=(1, 3, 0, 2, 3, 1),
        recompute=("none", "full", "none", "full", "full", "none"),
        cuts=(0, 2),
    ),
    "PP2 x ZeRO-2 x 2, split backward": Case(
        degrees=Degrees(pipe=2, data=2),
        micro_batch=1,
        zero=(2, 3, 0, 2, 3, 1),
        schedule="eager-1f1b",
        split=True,
        recompute=("none", "full", "none", "none", "full", "none"),
    ),
    "3 layers on PP2": Case(degrees=Degrees(pipe=2, data=2), micro_batch=1, layers=3, zero=1),
}
MODELS = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]


def model_name(family: str, tied: bool) -> str:
    return f"{family}-{'tied' if tied else 'untied'}"


def build_model(family: str, tied: bool, layers: int) -> nn.Module:
    """The same weights on every call. Non-persistent float32 buffers (rotary frequencies) become float64 as well."""
    if family == "gpt2":
        config: Any = GPT2Config(
            n_layer=layers,
            n_embd=32,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
        )
    else:
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=32,
            intermediate_size=56,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
        )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for name, param in model.named_parameters():
        if param.dim() == 1:  # norms start at 1 and biases at 0, which would hide mistakes
            param.data.add_(0.1 * torch.randn(param.shape, dtype=torch.float64))
        assert not param.isnan().any(), name
    for buffer in model.buffers():
        if buffer.dtype == torch.float32:
            buffer.data = buffer.data.double()
    return model


def make_batch(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, : TOKENS // 2] = -100
    labels[rows // 2, 2:] = -100
    return {"input_ids": ids, "labels": labels}


def strategy_tables(graph: Graph) -> StrategyTables:
    """On models this small communication costs more than it saves, so memory is priced high: everything is cut."""
    return StrategyTables.of(graph, Cluster.local(devices=RANKS), "fp64", rates=(0.0, 1e4))


def make_plan(tables: StrategyTables, case: Case) -> Plan:
    graph, cluster = tables.graph, tables.cluster
    sizes = Sizes(batch=case.micro_batch, seq=TOKENS)
    fingerprint = Fingerprint(
        model=graph.structure,
        model_name="test",
        global_batch=ROWS,
        seq=TOKENS,
        cluster=cluster.fingerprint(),
        cluster_name=cluster.name,
    )
    plan = fixed_plan(
        graph,
        {c: tables.table(c, case.degrees.mesh, sizes) for c in dict.fromkeys(graph.depth)},
        cluster,
        fingerprint=fingerprint,
        degrees=case.degrees,
        micro_batch=case.micro_batch,
        micro_batches=case.micro_batches,
        kinds=_per_layer(case.kinds, case.layers),
        zero=_per_layer(case.zero, case.layers),
        recompute=_per_layer(case.recompute, case.layers),
        cuts=case.cuts,
        schedule=case.schedule,
        precision="fp64",
    ).plan
    return msgspec.structs.replace(plan, fused_matmul=case.fused, split_backward=case.split)


def _per_layer(value: Any, layers: int) -> Any:
    return value if isinstance(value, (str, int)) else tuple(value)[: layers + 2]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def train_one(family: str, tied: bool, layers: int, promote: bool = True) -> Training:
    batches = [make_batch(i) for i in range(STEPS)]
    return train(build_model(family, tied, layers), batches, optimizer=adamw, clip_norm=CLIP, promote=promote)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """One model of one depth, with all that does not depend on the rank."""

    name: str
    model: nn.Module
    graph: Graph
    one: Training
    plans: Mapping[str, Plan]  # by the name of the case


def prepare(family: str, tied: bool, layers: int) -> Ready:
    model = build_model(family, tied, layers)
    graph = capture(model, make_batch(0), promote=True)
    tables = strategy_tables(graph)
    plans = {name: make_plan(tables, case) for name, case in CASES.items() if case.layers == layers}
    one = train_one(family, tied, layers)
    assert min(one.norms) > CLIP, "nothing would be clipped"
    return Ready(name=model_name(family, tied), model=model, graph=graph, one=one, plans=plans)


def prepare_all() -> Iterator[Sequence[Ready]]:
    """Each model in all depths. Capturing it and solving the tables takes longer than running a plan: once will do."""
    depths = sorted({case.layers for case in CASES.values()})
    for model in MODELS:
        yield [prepare(*model, layers) for layers in depths]


def run_plan(ready: Ready, plan: Plan) -> dict[str, float]:
    """How far these ranks are from one process."""
    axes = build_axes(plan.degrees, torch.device("cpu"), 60.0)
    program = Executable.of(rewrite(ready.graph, plan, axes.coordinate, axes.group_names), axes.group_names)
    store = ParamStore(program, axes, module_source(ready.model))
    step = TrainStep(program, store, plan, axes, ready.graph.inputs, adamw, max_norm=CLIP)
    found = differences(step, ready.one)
    with pytest.raises(BatchError, match=f"{ROWS - 1} rows; give {ROWS}"):
        step(make_batch(0, rows=ROWS - 1))
    axes.close()
    return found


def run_model(rank: int, world: int, depths: Sequence[Ready], folder: str) -> None:
    """Every case of one model on these ranks; rank 0 writes the largest differences."""
    found = {name: run_plan(ready, plan) for ready in depths for name, plan in ready.plans.items()}
    if rank == 0:
        Path(folder, f"{depths[0].name}.json").write_text(json.dumps(found))


@pytest.fixture
def found(
    request: pytest.FixtureRequest, run_ranks: Callable[..., None], shared_path: Path
) -> dict[str, dict[str, float]]:
    """What each case of one model gave. All models run one after another when the first is asked for, once for all
    workers: the turn that a test with processes takes covers its fixtures."""
    folder = shared_path / "equivalence"
    if not folder.exists():
        folder.mkdir()
        run_ranks(run_model, RANKS, str(folder), prepare=prepare_all)
    file = folder / f"{model_name(*request.param)}.json"
    assert file.exists(), "the ranks did not get so far: see the first test that failed"
    differences: dict[str, dict[str, float]] = json.loads(file.read_text())
    return differences


@pytest.mark.processes
@pytest.mark.slow  # four models, fifteen plans each: what the package promises
@pytest.mark.timeout(400)
@pytest.mark.parametrize("found", MODELS, ids=lambda model: model_name(*model), indirect=True)
def test_plans_equal_one_process(found: dict[str, dict[str, float]]) -> None:
    assert set(found) == set(CASES)
    wrong = {name: worst for name, worst in found.items() if not max(worst.values()) <= TOLERANCE}
    assert not wrong, f"these plans differ from one process: {wrong}"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model_name(*model))
def test_promoting_casts_changes_nothing_else(model: tuple[str, bool]) -> None:
    """What plans are held to is the untouched model, to the precision of the float32 that it casts to."""
    promoted, untouched = (train_one(*model, layers=4, promote=promote) for promote in (True, False))
    assert untouched.losses == pytest.approx(promoted.losses, rel=EAGER_TOLERANCE)
    for name, gradient in untouched.first_gradients.items():
        assert relative(promoted.first_gradients[name], gradient) <= EAGER_TOLERANCE, name


def test_sharded_plans_really_shard() -> None:
    """Equality would hold trivially if nothing were cut: tensor plans must hold a part of every matrix."""
    graph = capture(build_model("llama", False, 2), make_batch(0), promote=True)
    case = Case(degrees=Degrees(tensor=4), micro_batch=4, kinds="tensor", layers=2)
    block = make_plan(strategy_tables(graph), case).strategy(1)
    sharded = [
        p for p, info in zip(block.params, graph.layers[1].params, strict=True) if len(graph.param(info).shape) == 2
    ]
    assert len(sharded) == 7
    assert all(p.startswith("S") for p in sharded), sharded


@pytest.fixture(scope="module")
def gpt2_tables() -> StrategyTables:
    return strategy_tables(capture(build_model("gpt2", True, 4), make_batch(0), promote=True))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.degrees.tensor > 1])
def test_the_rewrite_moves_exactly_what_was_priced(name: str, gpt2_tables: StrategyTables) -> None:
    graph, plan = gpt2_tables.graph, make_plan(gpt2_tables, CASES[name])
    sizes = Sizes(batch=plan.micro_batch, seq=TOKENS)
    programs = [
        rewrite(graph, plan, Coordinate(pipe=stage, data=0, tensor=0), {"data": "d", "tensor": "t"})
        for stage in range(plan.degrees.pipe)
    ]
    priced = {s.key: gpt2_tables.price(s, plan.degrees.mesh, sizes).redistributions for s in plan.strategies}
    assert any(priced.values())
    check_priced(programs, priced, graph, plan)
    with pytest.raises(LegalityError, match="not priced"):
        check_priced(programs, {}, graph, plan)
