"""A Hugging Face configuration to a ModelSpec: the class with a loss that fits it, and batches for that class.

Only architectures whose code ships with transformers; ``auto_map`` (code from a hub repository) is never followed and
nothing is downloaded. The user's configuration is kept as it is, but for what only inference reads (``use_cache``) or
what is not a size (quantization of stored weights).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.errors import ModelError
from autoplan.models.spec import Batch, BatchFn, ModelSpec

# Positions looked up in a table of max_position_embeddings rows; rotary and ALiBi models have no such limit.
LEARNED_POSITIONS = frozenset(
    {
        "albert", "bart", "bert", "biogpt", "camembert", "codegen", "ctrl", "deberta", "distilbert", "electra", "ernie",
        "gpt2", "gpt_bigcode", "gpt_neo", "mbart", "mpnet", "openai-gpt", "opt", "pegasus", "roberta", "xlm",
        "xlm-roberta",
    }
)  # fmt: skip
PADDED_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert"})  # two rows of that table come before position 0
MASK_EVERY = 7  # masked language models predict about 15 % of their tokens
DEFAULT_SEQ = 2048


@dataclass(frozen=True, kw_only=True)
class Task:
    """One family of model classes with a loss, in transformers' own naming."""

    auto: str  # the Auto class
    names: str  # the table of its architectures: model_type -> class name(s)
    batch: Callable[[Any], BatchFn]


def _text(config: Any) -> BatchFn:
    def make(rows: int, seq: int) -> Batch:
        ids = torch.randint(0, config.vocab_size, (rows, seq))
        return {"input_ids": ids, "labels": ids}

    return make


def _masked(config: Any) -> BatchFn:
    def make(rows: int, seq: int) -> Batch:
        ids = torch.randint(0, config.vocab_size, (rows, seq))
        hidden = torch.arange(seq) % MASK_EVERY == 0
        return {"input_ids": ids, "labels": torch.where(hidden, ids, -100)}

    return make


def _image(config: Any) -> BatchFn:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)

    def make(rows: int, seq: int) -> Batch:
        labels = torch.randint(0, config.num_labels, (rows,))
        return {"pixel_values": torch.randn(rows, config.num_channels, height, width), "labels": labels}

    return make


# In order of preference: an encoder such as BERT is also listed as a causal model, which is not how it is trained.
TASKS = (
    Task(auto="AutoModelForSeq2SeqLM", names="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", batch=_text),
    Task(auto="AutoModelForMaskedLM", names="MODEL_FOR_MASKED_LM_MAPPING_NAMES", batch=_masked),
    Task(auto="AutoModelForCausalLM", names="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", batch=_text),
    Task(auto="AutoModelForImageClassification", names="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", batch=_image),
)


def from_config(data: dict[str, Any], *, name: str, spec: str) -> ModelSpec:
    """Raises ModelError naming the field that is missing or unknown."""
    transformers = _transformers()
    ours = {key: value for key, value in data.items() if key.startswith("_")}
    fields = {key: value for key, value in data.items() if key not in ours}
    notes = [ours["_note"]] if "_note" in ours else []
    if fields.pop("auto_map", None):
        notes.append(
            "the configuration points to code outside transformers (auto_map); the class that ships is used instead"
        )
    if fields.pop("quantization_config", None):
        notes.append("the configuration describes quantized weights; training is planned for full ones")
    config = _configuration(transformers, fields, spec)
    task = _task(transformers, config, spec)

    def build() -> nn.Module:
        auto = getattr(transformers, task.auto)
        # float32: master weights. The stored dtype of a released checkpoint says nothing about training.
        with _quiet():
            module: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if getattr(module, "loss_type", "") is None:
            # transformers then falls back to this, with a warning on every rank
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return module.train()

    positions = getattr(config, "max_position_embeddings", None)
    limited = config.model_type in LEARNED_POSITIONS and isinstance(positions, int)
    pads = 2 if config.model_type in PADDED_POSITIONS else 0
    max_seq = positions - pads if limited and positions is not None else None
    image = task.batch is _image
    return ModelSpec(
        name=name,
        spec=spec,
        build=build,
        make_batch=task.batch(config),
        default_seq=1 if image else ours.get("_seq", min(max_seq or DEFAULT_SEQ, positions or DEFAULT_SEQ)),
        max_seq=max_seq,
        vocab_size=None if image else config.vocab_size,
        notes=tuple(notes),
    )


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModelError(
            "Hugging Face configurations need transformers; install it with: pip install 'torch-autoplan[models]'"
        ) from None
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of transformers about generation settings concern nobody who trains."""
    from transformers.utils import logging as verbosity

    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        verbosity.set_verbosity(before)


def _configuration(transformers: Any, fields: dict[str, Any], spec: str) -> Any:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{spec} has no model_type; is it the config.json of a Hugging Face model?")
    rest = {key: value for key, value in fields.items() if key != "model_type"}
    try:
        with _quiet():
            config = transformers.AutoConfig.for_model(model_type, **rest)
    except ValueError as error:
        if "nrecognized model identifier" not in str(error):
            raise ModelError(f"{spec}: transformers refuses the configuration: {error}") from None
        raise ModelError(
            f"{spec}: transformers {transformers.__version__} ships no architecture {model_type!r}; "
            "give a package.module:factory that builds it"
        ) from None
    except Exception as error:  # noqa: BLE001 - a configuration class may raise anything on a malformed field
        raise ModelError(f"{spec}: transformers refuses the configuration: {type(error).__name__}: {error}") from None
    config.use_cache = False
    return config


def _task(transformers: Any, config: Any, spec: str) -> Task:
    from transformers.models.auto import modeling_auto

    named = (getattr(config, "architectures", None) or [None])[0]
    fitting = []
    for task in TASKS:
        classes = getattr(modeling_auto, task.names).get(config.model_type, ())
        classes = (classes,) if isinstance(classes, str) else tuple(classes)
        if named in classes:
            return task
        if classes:
            fitting.append(task)
    if getattr(config, "is_decoder", False):
        fitting.sort(key=lambda task: task.auto != "AutoModelForCausalLM")
    if not fitting:
        raise ModelError(
            f"{spec}: transformers has no {config.model_type} class with a language-model or image-classification "
            "loss; give a package.module:factory that returns (module, batch function)"
        )
    return fitting[0]
