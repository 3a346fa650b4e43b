"""A captured graph computes what the model computes: loss and gradients, whatever was folded."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from autoplan.capture import Graph, Sizes, capture, foldable, unfold
from autoplan.capture.layers import FEW
from autoplan.capture.trace import Promote
from autoplan.errors import ModelError
from autoplan.sharding.rows import row_mixing


def gpt2(layers: int = 2, tied: bool = True) -> nn.Module:
    config = GPT2Config(
        n_layer=layers,
        n_embd=32,
        n_head=4,
        vocab_size=97,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def llama(layers: int = 2, tied: bool = False) -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def tokens(rows: int, length: int, ignore: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    ids = torch.randint(0, 97, (rows, length), generator=generator)
    labels = ids.clone()
    if ignore:
        labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def run(graph: Graph, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Execute a captured graph, unsharded, at the sizes of ``batch``."""
    first = next(iter(batch.values()))
    sizes = Sizes(batch=first.shape[0], seq=first.shape[1] if first.dim() > 1 else 1)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_placeholder: dict[str, Any] = {x.placeholder: state[x.name] for x in (*graph.params, *graph.buffers)}
    by_placeholder |= {x.placeholder: batch[x.path] for x in graph.inputs}
    by_placeholder[graph.tangent] = torch.ones((), dtype=torch.float64)
    env: dict[Any, Any] = {}
    for node in graph.fx.nodes:
        if node.op == "output":
            break
        if "expr" in node.meta and node.op != "placeholder":
            env[node] = sizes.value(node.meta["expr"])
        elif node.op == "placeholder":
            env[node] = by_placeholder[node.name].detach()
            if "Long" not in env[node].type() and env[node].is_floating_point():
                env[node] = env[node].to(node.meta["specs"][0].dtype)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
            if isinstance(env[node], Tensor):
                assert tuple(env[node].shape) == node.meta["specs"][0].at(sizes), node.name
                assert env[node].dtype == node.meta["specs"][0].dtype, node.name
    named = {n.name: env[n] for n in env}
    grads = {name: sum(named[t] for t in terms) for name, terms in graph.gradients.items()}
    return named[graph.loss], grads


def eager(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    for buffer in model.buffers():
        if buffer.dtype == torch.float32:
            buffer.data = buffer.data.double()
    with Promote():
        loss = model(**batch, use_cache=False).loss
        model.zero_grad()
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(graph: Graph, model: nn.Module, batch: dict[str, Tensor]) -> None:
    expected_loss, expected = eager(model, batch)
    loss, grads = run(graph, model, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_graph_equals_eager_at_other_sizes_than_traced(make: Any, tied: bool) -> None:
    model = make(2, tied)
    graph = capture(model, tokens(4, 16), promote=True)
    for rows, length in ((1, 16), (3, 9), (4, 32)):
        assert_same(graph, model, tokens(rows, length, ignore=True))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_folded_graph_unfolds_to_the_whole_one(make: Any) -> None:
    model = make(7)
    whole = capture(model, tokens(4, 16), promote=True)
    folded = capture(model, tokens(4, 16), promote=True, folded=True)
    assert folded.folded
    assert len(folded.layers) == 5
    assert len(folded.depth) == 9
    assert folded.structure == whole.structure
    assert folded.depth == whole.depth
    assert {p.name for p in folded.unfolded_params} == {p.name for p in model_params(model)}
    again = unfold(folded)
    assert not again.folded
    assert [layer.class_id for layer in again.layers] == list(whole.depth)
    assert [set(a.params) for a in again.layers] == [set(b.params) for b in whole.layers]
    assert_same(again, model, tokens(3, 9))
    assert len(list(model.named_parameters())) == len(folded.unfolded_params), "capture must leave the model whole"


def model_params(model: nn.Module) -> list[Any]:
    return [type("Named", (), {"name": n}) for n, _ in model.named_parameters()]


class Ramp(nn.Module):
    """Blocks that look alike and are not: each multiplies by its own index, which only the trace shows."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RampBlock(i) for i in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


class RampBlock(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * (1.0 + self.layer_idx)


def test_blocks_that_only_look_equal_are_traced_whole() -> None:
    graph = capture(Ramp(6), {"x": torch.zeros(4, 8, dtype=torch.float64)}, folded=True)
    assert not graph.folded
    assert len(graph.params) == 12


def test_layers_are_one_class_and_carry_their_gradients() -> None:
    graph = capture(gpt2(3), tokens(4, 16))
    prologue, first, second, third, epilogue = graph.layers
    assert first.class_id == second.class_id == third.class_id
    assert len({prologue.class_id, first.class_id, epilogue.class_id}) == 3
    assert first.inputs == prologue.outputs
    assert second.grads_out == first.grads_in
    assert graph.gradients["transformer.wte.weight"]
    assert len(graph.gradients["transformer.wte.weight"]) == 2
    assert epilogue.outputs == (graph.loss,)
    assert epilogue.grads_in == (graph.tangent,)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_few_blocks_are_cut_in_two(make: Any) -> None:
    model = make(3)
    graph = capture(model, tokens(4, 16), promote=True, folded=True, finely=True)
    assert_same(graph, model, tokens(3, 9))
    attention, mlp = graph.depth[1:3]
    assert graph.depth[1:-1] == (attention, mlp) * 3
    assert len(set(graph.depth)) == 4
    blocks = [layer for layer in graph.layers if layer.class_id in (attention, mlp)]
    assert all(len(layer.inputs) == len(layer.outputs) == 1 for layer in blocks)
    held = [{name for name in layer.params if "mlp" in name} for layer in blocks]
    assert [bool(names) for names in held] == [False, True] * 3
    assert set(blocks[1].params) >= held[1]
    assert not foldable(model)


def test_many_blocks_stay_whole_and_fold() -> None:
    """Whichever way a model is captured its plans must fit it."""
    model = gpt2(FEW + 1)
    folded, whole = (capture(model, tokens(4, 16), folded=f, finely=True) for f in (True, False))
    assert foldable(model)
    assert folded.folded
    assert folded.structure == whole.structure
    assert len(folded.depth) == FEW + 3
    few = gpt2(6)
    assert (
        capture(few, tokens(4, 16), folded=True, finely=True).structure
        == capture(few, tokens(4, 16), finely=True).structure
    )


class Crossed(nn.Module):
    """Blocks with no place where one value crosses: each has two streams all along."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x.square()
        for block in self.blocks:
            x, y = torch.tanh(block(y)) + x, torch.tanh(block(x)) * y
        return (x * y).mean()


def test_a_block_that_cannot_be_cut_in_two_is_left_whole() -> None:
    batch = {"x": torch.randn(4, 8, dtype=torch.float64)}
    assert capture(Crossed(), batch, finely=True).structure == capture(Crossed(), batch).structure


def test_capturing_on_the_meta_device_allocates_nothing() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(num_hidden_layers=24, hidden_size=8192, num_attention_heads=64)
        )
        batch = {"input_ids": torch.zeros(8, 128, dtype=torch.long), "labels": torch.zeros(8, 128, dtype=torch.long)}
    graph = capture(model, batch, folded=True)
    assert sum(p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1) for p in graph.unfolded_params) > 5e9
    assert len(graph.depth) == 26


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line a user must be shown
            y = y * 2
        return y.mean()


def test_data_dependent_control_flow_names_the_users_line() -> None:
    with pytest.raises(ModelError, match=r"test_capture\.py:\d+: if y\.sum\(\) > 0"):
        capture(Branch(), {"x": torch.zeros(4, 4)})


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_model_without_a_loss_is_told_what_to_do() -> None:
    with pytest.raises(ModelError, match="loss_fn"):
        capture(NoLoss(), {"x": torch.zeros(4, 4)})
    graph = capture(NoLoss(), {"x": torch.zeros(4, 4)}, lambda output, batch: (output - batch["x"]).square().mean())
    assert graph.loss_kind == "mean"


@dataclass
class Pair:
    ids: Tensor
    weight: Tensor | None = None


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, pair: Pair, scale: float = 1.0, unused: Tensor | None = None) -> dict[str, Tensor]:
        made = self.embed(pair.ids)
        return {"loss": (made if pair.weight is None else made * pair.weight[:, :, None]).square().mean() * scale}


@pytest.mark.parametrize("weighted", [True, False])
def test_batches_may_hold_dataclasses_numbers_and_nothing(weighted: bool) -> None:
    model, ids = OfPairs().double(), torch.randint(10, (3, 5))
    weight = torch.rand(3, 5, dtype=torch.float64) if weighted else None
    batch = UserDict({"pair": Pair(ids, weight), "scale": 2.0, "unused": None})
    graph = capture(model, batch)
    given = {"pair.ids": ids} | ({"pair.weight": weight} if weighted else {})
    assert [info.path for info in graph.inputs] == list(given)
    loss, _ = run(graph, model, given)
    torch.testing.assert_close(loss, model(**batch)["loss"].detach())


def test_a_module_with_two_names_is_left_as_it_was() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.again(self.first(x))).square().mean()

    model, x = Shared().double(), torch.rand(3, 4, dtype=torch.float64)
    before = dict(model.named_parameters())
    graph = capture(model, {"x": x})
    assert all(param is before[name] for name, param in model.named_parameters())
    loss, gradients = run(graph, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, rtol=1e-9, atol=1e-14)


def test_a_model_that_counts_its_rows_is_for_that_many() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.left(x) @ self.right(x).T
            return nn.functional.cross_entropy(scores, torch.arange(len(scores)))

    model, x = Contrast().double(), torch.rand(7, 4, dtype=torch.float64)
    graph = capture(model, {"x": x})
    assert "plain number" in str(row_mixing(graph, 1))
    loss, _ = run(graph, model, {"x": x})
    torch.testing.assert_close(loss, model(x).detach())
    with pytest.raises(ModelError, match="at least two"):
        capture(model, {"x": x[:1]})


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing to train"):
        capture(NoLoss().requires_grad_(False), {"x": torch.zeros(4, 4)})


@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [
        (lambda out, b: out.square().mean(), "mean"),
        (lambda out, b: out.square().sum(), "sum"),
        (lambda out, b: out.square().mean() + 1.0, "mean"),
        (lambda out, b: out.square().sum() + 1.0, "mixed"),
        (lambda out, b: out.square().sum() / b["x"].shape[0], "mean"),
        (lambda out, b: (out * b["mask"]).sum() / b["mask"].sum(), "tokens"),
        (lambda out, b: 0.5 * nn.functional.mse_loss(out, b["x"]), "mean"),
        (lambda out, b: nn.functional.cross_entropy(out, b["x"].argmax(-1)), "tokens"),
        (lambda out, b: out.square().mean().sqrt(), "mixed"),
        (lambda out, b: out.logsumexp(0).mean(), "mixed"),
    ],
)
def test_how_a_loss_splits_over_rows(loss_fn: Any, kind: str) -> None:
    batch = {"x": torch.rand(6, 4), "mask": torch.ones(6, 4)}

    class Only(NoLoss):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return self.linear(x)

    assert capture(Only(), batch, loss_fn).loss_kind == kind


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class Odd(nn.Module):
    """Eight blocks of one kind; the sixth is called differently, which no traced block shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(Scaled() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x, 3.0 if i == 5 else 2.0)
        return x.mean()


def test_what_runs_does_not_rest_on_a_fold() -> None:
    """The fold cannot see it; the whole graph, which is what runs, has another structure, so no such plan is run."""
    batch = {"x": torch.zeros(4, 8, dtype=torch.float64)}
    folded, whole = capture(Odd(), batch, folded=True), capture(Odd(), batch)
    assert folded.folded
    assert folded.structure != whole.structure


class Activated(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.act = torch.tanh if index < 4 else torch.sigmoid
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


def test_blocks_with_other_functions_are_not_folded() -> None:
    model = Ramp(0)
    model.blocks = nn.ModuleList(Activated(i) for i in range(8))
    assert not capture(model, {"x": torch.zeros(4, 8, dtype=torch.float64)}, folded=True).folded


def test_calls_in_place_keep_their_layers() -> None:
    """``nn.RMSNorm`` adds its epsilon in place, so the graph is made functional; its backward stays layer by layer."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    graph = capture(Normed(), {"ids": torch.zeros(4, 6, dtype=torch.long)})
    assert len(graph.layers) >= 5
    assert all(layer.backward for layer in graph.layers)
    assert max(graph.depth.count(each) for each in graph.depth) >= 3
    for name, terms in graph.gradients.items():
        for term in terms:
            assert name in graph.layers[graph.node(term).meta["layer"]].params
