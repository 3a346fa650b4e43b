"""Every kind of plan computes what one process computes: losses, gradients, clip norm and parameters, float64, real
ranks.

For each model and tie one set of ranks runs every plan for five steps and compares, on rank 0, with the eager model
trained beside it. Casts to float32 inside the models (norms, rotary tables, the loss) are promoted to float64 on both
sides; the untouched model is held to 1e-5. Labels are ignored unevenly, so that a mean of micro-batch means would fail.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from autoplan.capture import Graph, Sizes, capture
from autoplan.capture.trace import Promote
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import BatchError, LegalityError
from autoplan.plans import Degrees, Fingerprint, Plan, Recompute, Schedule
from autoplan.rewrite import Coordinate, check_priced, rewrite
from autoplan.runtime.mesh import build_axes
from autoplan.runtime.params import ParamStore, module_source
from autoplan.runtime.step import TrainStep
from autoplan.search.fixed import fixed_plan
from autoplan.search.strategies import StrategyTables

RANKS, ROWS, TOKENS, VOCABULARY, STEPS = 4, 8, 16, 96, 5
CLIP, RATE = 0.7, 1e-2
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
    rows: int = field(default=ROWS)

    @property
    def micro_batches(self) -> int:
        return self.rows // (self.degrees.data * self.micro_batch)


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
    "3 layers on PP2": Case(degrees=Degrees(pipe=2, data=2), micro_batch=1, layers=3, zero=1),
}
MODELS = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]


def build_model(family: str, tied: bool, layers: int, dtype: torch.dtype = torch.float64) -> nn.Module:
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
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, param in model.named_parameters():
        if param.dim() == 1:  # norms start at 1 and biases at 0, which would hide mistakes
            param.data.add_(0.1 * torch.randn(param.shape, dtype=dtype))
        assert not param.isnan().any(), name
    if dtype == torch.float64:
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


def make_plan(graph: Graph, case: Case, cluster: Cluster) -> tuple[Plan, StrategyTables]:
    # On models this small communication costs more than it saves, so memory is priced high: everything is cut.
    tables = StrategyTables.of(graph, cluster, "fp64", rates=(0.0, 1e4))
    sizes = Sizes(batch=case.micro_batch, seq=TOKENS)
    fingerprint = Fingerprint(
        model=graph.structure,
        model_name="test",
        global_batch=case.rows,
        seq=TOKENS,
        cluster=cluster.fingerprint(),
        cluster_name=cluster.name,
    )
    found = {c: tables.table(c, case.degrees.mesh, sizes) for c in dict.fromkeys(graph.depth)}
    plan = fixed_plan(
        graph,
        found,
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
    if case.fused:
        plan = msgspec.structs.replace(plan, fused_matmul=True)
    return plan, tables


def _per_layer(value: Any, layers: int) -> Any:
    return value if isinstance(value, (str, int)) else tuple(value)[: layers + 2]


def build(plan: Plan, graph: Graph, model: nn.Module) -> TrainStep:
    axes = build_axes(plan.degrees, torch.device("cpu"), 60.0)
    groups = {a: axes.group_names[a] for a in ("data", "tensor") if axes.degree(a) > 1}
    program = rewrite(graph, plan, axes.coordinate, groups)
    store = ParamStore(program, axes, module_source(model))
    return TrainStep(program, store, plan, axes, graph.inputs, lambda p: torch.optim.AdamW(p, lr=RATE), max_norm=CLIP)


def whole_gradients(step: TrainStep) -> dict[str, Tensor]:
    """This stage's gradients as the optimizer saw them (clipped), whole, by name. A collective of the stage."""
    return {
        held.spec.name: step.store.full_tensor(held, master.grad.detach()).clone()
        for held, master in step.store.trainable
        if master.grad is not None
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    scale = float(expected.abs().max())
    return float((actual - expected).abs().max()) / (scale if scale > 0 else 1.0)


class Reference:
    """The eager model on one process; what it did at each step is kept, so that all plans share one run."""

    def __init__(self, family: str, tied: bool, layers: int, promote: bool) -> None:
        model = build_model(family, tied, layers, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.first_gradients: dict[str, Tensor] = {}
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = self._loss(model, make_batch(i), promote)
            loss.backward()
            self.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            if i == 0:
                self.first_gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            self.losses.append(float(loss.detach()))
        self.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}

    @staticmethod
    def _loss(model: nn.Module, batch: dict[str, Tensor], promote: bool) -> Tensor:
        if not promote:
            return model(**batch, use_cache=False).loss
        with Promote():
            return model(**batch, use_cache=False).loss


def compare(plan: Plan, graph: Graph, model: nn.Module, reference: Reference) -> dict[str, float]:
    """Worst relative differences of this rank's stage from the reference."""
    step = build(plan, graph, model)
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0}
    seen: dict[str, Tensor] = {}
    hook = step.optimizer.register_step_pre_hook(lambda *_: seen.update(whole_gradients(step)))
    for i in range(STEPS):
        loss = float(step(make_batch(i)))
        if i == 0:
            hook.remove()
            assert seen, "no gradients were seen"
            for name, gradient in seen.items():
                worst["gradient"] = max(worst["gradient"], relative(gradient, reference.first_gradients[name]))
        worst["loss"] = max(worst["loss"], abs(loss / reference.losses[i] - 1))
        norm = step.last_grad_norm
        assert norm is not None
        worst["norm"] = max(worst["norm"], abs(norm / reference.norms[i] - 1))
    for name, value in step.store.full_state_dict().items():
        if name in reference.parameters:
            worst["parameter"] = max(worst["parameter"], relative(value, reference.parameters[name]))
    step.axes.close()
    return worst


def write_plans(folder: Path) -> None:
    """Plan every case once, for the ranks to read: solving the tables takes longer than running the plans."""
    cluster = Cluster.local(devices=RANKS)
    plans: dict[str, Any] = {}
    for family, tied in MODELS:
        graphs: dict[int, Graph] = {}
        for name, case in CASES.items():
            if case.layers not in graphs:
                graphs[case.layers] = capture(build_model(family, tied, case.layers), make_batch(0), promote=True)
            plan, _ = make_plan(graphs[case.layers], case, cluster)
            plans[f"{family} {tied} {name}"] = msgspec.to_builtins(plan)
    (folder / "plans.json").write_text(json.dumps(plans))


def run_all(rank: int, world: int, folder: str) -> None:
    """Every model and case on these ranks; rank 0 writes the worst differences over all ranks."""
    plans = json.loads(Path(folder, "plans.json").read_text())
    results: dict[str, Any] = {}
    for family, tied in MODELS:
        graphs: dict[int, Graph] = {}
        references: dict[int, Reference] = {}
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            if case.layers not in graphs:
                model = build_model(family, tied, case.layers)
                graphs[case.layers] = capture(model, make_batch(0), promote=True)
                references[case.layers] = Reference(family, tied, case.layers, promote=True)
            plan = msgspec.convert(plans[f"{family} {tied} {name}"], Plan)
            model = build_model(family, tied, case.layers)
            worst = compare(plan, graphs[case.layers], model, references[case.layers])
            merged = torch.tensor([worst[k] for k in sorted(worst)], dtype=torch.float64)
            dist.all_reduce(merged, dist.ReduceOp.MAX)
            found[name] = dict(zip(sorted(worst), merged.tolist(), strict=True))
        eager, promoted = Reference(family, tied, 4, promote=False), references[4]
        differences = [abs(a / b - 1) for a, b in zip(eager.losses, promoted.losses, strict=True)]
        differences += [relative(promoted.first_gradients[n], g) for n, g in eager.first_gradients.items()]
        found["untouched eager model"] = {"loss and gradients": max(differences)}
        results[f"{family} {tied}"] = found
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))


_RESULTS: dict[str, Any] = {}


@pytest.fixture
def results(request: pytest.FixtureRequest, run_ranks: Callable[..., None], tmp_path: Path) -> dict[str, Any]:
    """What every case of one model gave. All models run once, on one set of ranks: starting them costs most."""
    family, tied = request.param
    if not _RESULTS:
        write_plans(tmp_path)
        run_ranks(run_all, RANKS, str(tmp_path), timeout_s=60)
        _RESULTS.update(json.loads((tmp_path / "results.json").read_text()))
    return _RESULTS[f"{family} {tied}"]


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("results", MODELS, ids=[f"{f}-{'tied' if t else 'untied'}" for f, t in MODELS], indirect=True)
def test_plans_equal_one_process(results: dict[str, Any]) -> None:
    assert set(results) == {*CASES, "untouched eager model"}
    untouched = results["untouched eager model"]["loss and gradients"]
    assert untouched <= EAGER_TOLERANCE, f"promoting the casts changed the model by {untouched:.2e}"
    wrong = {name: r for name, r in results.items() if name in CASES and not max(r.values()) <= TOLERANCE}
    assert not wrong, f"these plans differ from one process: {wrong}"


def test_sharded_plans_really_shard() -> None:
    """Equality would hold trivially if nothing were cut: tensor plans must hold a part of every matrix."""
    graph = capture(build_model("llama", False, 2), make_batch(0), promote=True)
    cluster = Cluster.local(devices=4)
    plan, _ = make_plan(graph, Case(degrees=Degrees(tensor=4), micro_batch=4, kinds="tensor", layers=2), cluster)
    block = plan.strategy(1)
    sharded = [
        p for p, info in zip(block.params, graph.layers[1].params, strict=True) if len(graph.param(info).shape) == 2
    ]
    assert len(sharded) == 7
    assert all(p.startswith("S") for p in sharded), sharded


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.degrees.tensor > 1])
def test_the_rewrite_moves_exactly_what_was_priced(name: str) -> None:
    case = CASES[name]
    graph = capture(build_model("gpt2", True, 4), make_batch(0), promote=True)
    cluster = Cluster.local(devices=RANKS)
    plan, tables = make_plan(graph, case, cluster)
    sizes = Sizes(batch=case.micro_batch, seq=TOKENS)
    programs = [
        rewrite(graph, plan, Coordinate(pipe=stage, data=0, tensor=0), {"data": "d", "tensor": "t"})
        for stage in range(plan.degrees.pipe)
    ]
    priced = {s.key: tables.price(s, plan.degrees.mesh, sizes).redistributions for s in plan.strategies}
    assert any(priced.values())
    check_priced(programs, priced, graph, plan)
    with pytest.raises(LegalityError, match="not priced"):
        check_priced(programs, {}, graph, plan)


def _unequal(rank: int, world: int) -> None:
    graph = capture(build_model("gpt2", True, 2), make_batch(0), promote=True)
    case = Case(degrees=Degrees(data=2, pipe=2), micro_batch=2, layers=2)
    plan, _ = make_plan(graph, case, Cluster.local(devices=world))
    step = build(plan, graph, build_model("gpt2", True, 2))
    with pytest.raises(BatchError, match=r"7 rows; give 8"):
        step(make_batch(0, rows=7))


@pytest.mark.processes
def test_a_batch_of_unequal_micro_batches_is_refused(run_ranks: Callable[..., None]) -> None:
    run_ranks(_unequal, RANKS, timeout_s=60)
