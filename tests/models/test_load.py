"""MODEL, as typed: shipped architectures have the published sizes, and every refusal says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import BatchError, ModelError
from autoplan.models import ModelSpec, load, shipped_names
from autoplan.models.shipped import shipped_config

TINY = {
    "model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 8,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(TINY | changes))
    return str(path)


def loss_of(spec: ModelSpec, rows: int, seq: int) -> torch.Tensor:
    loss: torch.Tensor = spec.build()(**spec.batch(rows, seq, seed=0)).loss
    return loss


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_models_have_their_published_size_and_a_source(name: str) -> None:
    spec, config = load(name), shipped_config(name)
    parameters = sum(p.numel() for p in spec.meta_model().parameters())
    assert config["_source"]
    if "_parameters" in config:
        assert parameters == config["_parameters"]
    assert spec.seq(None) == config["_seq"]
    assert not [note for note in spec.notes if "refuses" in note], "a shipped architecture must be runnable"


def test_gpt3_has_the_size_in_its_name() -> None:
    parameters = sum(p.numel() for p in load("gpt3-175b").meta_model().parameters())
    assert parameters == pytest.approx(175e9, rel=0.01)


def test_planning_batches_have_shapes_only() -> None:
    batch = load("gpt3-175b").batch(1536)
    assert {key: (tuple(t.shape), t.device.type) for key, t in batch.items()} == {
        "input_ids": ((1536, 2048), "meta"),
        "labels": ((1536, 2048), "meta"),
    }


def test_a_seed_fixes_the_batch_and_leaves_the_global_generator() -> None:
    spec = load("gpt2")
    state = torch.random.get_rng_state()
    one, two, other = (spec.batch(2, 8, seed=seed)["input_ids"] for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    spec = load("config.json")
    assert spec.name == tmp_path.name
    assert Path(spec.spec).is_absolute()
    assert torch.isfinite(loss_of(spec, 2, 8))
    assert load(str(tmp_path)).spec == spec.spec, "a folder that holds a config.json will do"


@pytest.mark.parametrize("kind", ["bert", "t5", "vit"])
def test_other_families_get_a_class_with_a_loss(kind: str, tmp_path: Path) -> None:
    config = {
        "bert": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
        "t5": {"num_layers": 1, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "decoder_start_token_id": 0},
        "vit": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
    }[kind]
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    assert torch.isfinite(loss_of(load(str(path)), 2, 8))


def test_dropout_is_kept(tmp_path: Path) -> None:
    spec = load(written(tmp_path, attn_pdrop=0.25))
    assert not spec.notes
    assert spec.build().config.attn_pdrop == 0.25  # type: ignore[union-attr]


def test_remote_code_is_never_followed(tmp_path: Path) -> None:
    spec = load(written(tmp_path, auto_map={"AutoModelForCausalLM": "somebody/repository--model.Evil"}))
    assert type(spec.meta_model()).__module__.startswith("transformers.")
    assert any("auto_map" in note for note in spec.notes)


def test_learned_positions_bound_the_sequence() -> None:
    with pytest.raises(BatchError, match="at most that, not 2048"):
        load("gpt2").batch(2, 2048)
    assert load("llama3-8b").seq(131072) == 131072


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("lama3-8b", "did you mean llama3-8b"),
        ("zzz", "shipped are bert-large"),
        ("no/such/config.json", "cannot read"),
        ("no_such_module:factory", "cannot import 'no_such_module'"),
        ("json:nothing", "has no function 'nothing'"),
    ],
)
def test_unknown_models(spec: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(spec)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "one JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "nobody-knows"}', "ships no architecture 'nobody-knows'"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "refuses the configuration"),
        ('{"model_type": "clap"}', "no clap class"),
    ],
)
def test_malformed_configurations(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=says):
        load(str(path))


FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).square().mean()

def with_batch():
    return Net(), lambda rows, seq: {"x": torch.randn(rows, seq, 4)}

def alone():
    return Net()

def wrong():
    return 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_factories", raising=False)
    return "my_factories"


def test_a_factory_of_the_users_own(factories: str) -> None:
    spec = load(f"{factories}:with_batch")
    assert spec.name == "with_batch"
    assert spec.batch(3, 5)["x"].is_meta
    assert spec.build()(**spec.batch(3, 5, seed=0)).ndim == 0
    with pytest.raises(BatchError, match="give --seq"):
        spec.batch(3)


def test_a_factory_that_does_not_say_enough(factories: str) -> None:
    with pytest.raises(ModelError, match=r"return \(module, batch\)"):
        load(f"{factories}:alone")
    with pytest.raises(ModelError, match="returned int"):
        load(f"{factories}:wrong")
