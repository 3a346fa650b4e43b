"""Checkpoints that know nothing of the plan: whole names and shapes, so any plan of the same model can load them.

A checkpoint is a directory: safetensors files that torch's distributed checkpoint (DCP) writes, one for each rank,
and ``autoplan.json``, which says what is in them. Tensors are named

    model.<parameter or buffer>            the master copy (float32 under bf16)
    optimizer.<parameter>.<state>          as the optimizer calls it: exp_avg, exp_avg_sq, step, ...

DCP's own file format is not used: its ``.metadata`` is a pickle, and unpickling a file from elsewhere runs what it
says. Its safetensors writer and reader take everything from the files' JSON headers.

A checkpoint is written under another name and renamed when all of it is on disk, so it is there whole or not at all.
The directory must be on storage that all ranks see.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoplan.errors import UserError
from autoplan.runtime.collectives import all_gather_rows
from autoplan.runtime.params import HeldParam, ParamStore, local_tensor
from autoplan.runtime.pieces import row_range
from autoplan.runtime.step import TrainStep

MANIFEST = "autoplan.json"
FORMAT = 1


def save(step: TrainStep, path: str | Path) -> None:
    """Write the training state. Every rank calls it. An older checkpoint of this name stays until this one is whole."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    trouble = ""
    if dist.get_rank() == 0 and path.exists() and not (path / MANIFEST).exists():
        trouble = f"{path} exists and is no checkpoint; give another name or remove it"
    _raise_together(trouble)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = dict(_state(step))
    entries: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(entries, {name: [str(t.dtype), list(t.shape)] for name, t in state.items()})
    # A rank whose shard is empty has nothing to write (DCP would refuse a chunk that starts at the end).
    written: dict[str, Any] = {name: t for name, t in state.items() if _local(t).numel() > 0}
    state_dict_saver.save(written, storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True))
    if dist.get_rank() == 0:
        _write_manifest(step, partial, {name: entry for own in entries for name, entry in own.items()})
        _replace(partial, path)
    dist.barrier()


@torch.no_grad()
def load(step: TrainStep, path: str | Path) -> None:
    """Read a checkpoint into ``step``, whatever plan wrote it. Every rank calls it; UserError comes on all or none."""
    found: Path = Path(path)
    manifest: dict[str, Any] = {}
    trouble = ""
    try:
        found = _newest_whole(Path(path))
        manifest = _read_manifest(found)
        _check(step, found, manifest)
    except UserError as error:
        trouble = str(error)
    _raise_together(trouble)

    targets: dict[str, Any] = {}
    finishers: list[Callable[[], None]] = []
    for name, target, finish in _targets(step, manifest["tensors"]):
        targets[name] = target
        finishers.append(finish)
    state_dict_loader.load(
        {name: t for name, t in targets.items() if _local(t).numel() > 0},
        storage_reader=HuggingFaceStorageReader(str(found)),
    )
    for finish in finishers:
        finish()
    step.store.publish()
    for group, values in zip(step.optimizer.param_groups, manifest["param_groups"], strict=True):
        _set_group(group, values)
    step.steps = manifest["steps"]


def _state(step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    """What this rank says of the training state, by name. Where stages share a parameter, the first speaks for it."""
    store = step.store
    for held in store.params:
        if not store.owns(held):
            continue
        name = held.spec.name
        yield f"model.{name}", _as_dtensor(store, held, local_tensor(held))
        for key, value in _optimizer_state(step, held).items():
            scalar = _is_scalar(held, key, list(value.shape))
            yield f"optimizer.{name}.{key}", value if scalar else _as_dtensor(store, held, value)
    updated = _updated_buffers(store)
    for name, buffer in zip(store.buffer_names, store.buffers, strict=True):
        if name in store.updated_buffers or name not in updated:
            yield f"model.{name}", buffer


def _updated_buffers(store: ParamStore) -> set[str]:
    """Buffers that a step changes, of all stages: each stage has every buffer, but only one keeps it up to date."""
    everywhere: list[tuple[str, ...]] = [()] * store.axes.degrees.pipe
    dist.all_gather_object(everywhere, store.updated_buffers, group=store.axes.groups["pipe"])
    return {name for names in everywhere for name in names}


def _targets(
    step: TrainStep, entries: dict[str, tuple[str, list[int]]]
) -> Iterator[tuple[str, Tensor, Callable[[], None]]]:
    """(name, the tensor to read into, what to do once it is read); makes the optimizer's state tensors."""
    store = step.store
    for held in store.params:
        name = held.spec.name
        yield f"model.{name}", *_landing(store, held, local_tensor(held))
        if held.master is None:
            continue
        state: dict[str, Tensor] = {}
        step.optimizer.state[held.master] = state
        prefix = f"optimizer.{name}."
        for entry in sorted(e for e in entries if e.startswith(prefix) and "." not in e.removeprefix(prefix)):
            key = entry.removeprefix(prefix)
            dtype, shape = entries[entry]
            if _is_scalar(held, key, shape):
                state[key] = torch.zeros(shape, dtype=_dtype(dtype), device=_scalar_device(step, held.master))
                yield entry, state[key], _nothing
            else:
                state[key] = torch.zeros_like(held.master, requires_grad=False)
                yield entry, *_landing(store, held, state[key])
    for name, buffer in zip(store.buffer_names, store.buffers, strict=True):
        yield f"model.{name}", buffer, _nothing


def _as_dtensor(store: ParamStore, held: HeldParam, local: Tensor) -> DTensor:
    """``local`` in a form DCP can place.

    A blocked shard is many boxes of the tensor, and a safetensors file has room for one of a name: it is gathered,
    and each tensor rank writes its chunk of rows.
    """
    dtensor = store.to_dtensor(held, local)
    if dtensor is not None:
        return dtensor
    full = store.full_tensor(held, local)
    return _rows_over_tensor_axis(store, held, full[slice(*_own_rows(store, held))].contiguous())


def _landing(store: ParamStore, held: HeldParam, local: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The inverse of ``_as_dtensor``: a tensor for DCP to read into, and the way from there into ``local``."""
    dtensor = store.to_dtensor(held, local)
    if dtensor is not None:
        return dtensor, _nothing
    first, end = _own_rows(store, held)
    rows = local.new_zeros(end - first, *held.spec.shape[1:])

    def finish() -> None:
        full = local.new_empty(held.spec.shape)
        all_gather_rows([rows], [full], store.axes.groups["tensor"])
        local.copy_(store.local_part(held, full))

    return _rows_over_tensor_axis(store, held, rows), finish


def _own_rows(store: ParamStore, held: HeldParam) -> tuple[int, int]:
    return row_range(held.spec.shape[0], store.axes.degrees.tensor, store.axes.coordinate.tensor)


def _rows_over_tensor_axis(store: ParamStore, held: HeldParam, rows: Tensor) -> DTensor:
    shape = torch.Size(held.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows, store.axes.stage_mesh, [Shard(0), Replicate()], run_check=False, shape=shape, stride=stride
    )


def _optimizer_state(step: TrainStep, held: HeldParam) -> dict[str, Tensor]:
    """The tensors that the optimizer keeps for a parameter."""
    kept: dict[str, Tensor] = {}
    if held.master is None:
        return kept
    for key, value in step.optimizer.state.get(held.master, {}).items():
        if value is None:
            continue
        shape = list(value.shape) if isinstance(value, Tensor) else None
        if shape is None or not (value.shape == held.master.shape or _is_scalar(held, key, shape)):
            raise UserError(
                f"the optimizer's state {key!r} of {held.spec.name} is neither a number nor shaped like the parameter; "
                "a checkpoint that any plan can load has no place for it"
            )
        kept[key] = value
    return kept


def _is_scalar(held: HeldParam, key: str, shape: list[int]) -> bool:
    """Whether a state is one number for the parameter (of a parameter without dims only the step count is)."""
    return not shape and (bool(held.spec.shape) or key == "step")


def _scalar_device(step: TrainStep, master: Tensor) -> torch.device | None:
    """torch's optimizers keep the step count on the host, unless they are to run without it."""
    for group in step.optimizer.param_groups:
        if any(master is p for p in group["params"]) and (group.get("capturable") or group.get("fused")):
            return master.device
    return None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _nothing() -> None:
    pass


def _write_manifest(step: TrainStep, directory: Path, tensors: dict[str, Any]) -> None:
    manifest = {
        "format": FORMAT,
        "steps": step.steps,
        "optimizer": type(step.optimizer).__name__,
        "param_groups": [_plain_values(group) for group in step.optimizer.param_groups],
        "tensors": tensors,
        "files": {file.name: file.stat().st_size for file in sorted(directory.iterdir())},
    }
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _plain_values(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as far as JSON can say them."""
    values = {key: float(v) if isinstance(v, Tensor) else v for key, v in group.items() if key != "params"}
    return {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str, list, tuple, type(None)))}


def _set_group(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _replace(partial: Path, path: Path) -> None:
    """Put a finished checkpoint in its place. At every moment ``path`` or ``path.old`` is whole."""
    old = path.with_name(f"{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _newest_whole(path: Path) -> Path:
    for candidate in (path, path.with_name(f"{path.name}.old")):
        if (candidate / MANIFEST).is_file():
            return candidate
    raise UserError(f"{path} is not a whole checkpoint: it has no {MANIFEST}; give the directory that was saved to")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / MANIFEST} cannot be read ({error}); use another checkpoint") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of format {FORMAT}; use another checkpoint")
    for name, size in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"{file} is missing or damaged (it should have {size} bytes); use another checkpoint")
    return manifest


def _check(step: TrainStep, path: Path, manifest: dict[str, Any]) -> None:
    """Raise UserError where the checkpoint is of another model or optimizer."""
    tensors = manifest["tensors"]
    for held in step.store.params:
        _, shape = tensors.get(f"model.{held.spec.name}", ("", None))
        if shape is None:
            raise UserError(f"{path} has no parameter {held.spec.name}; it is of another model")
        if tuple(shape) != held.spec.shape:
            raise UserError(f"{held.spec.name} is {tuple(shape)} in {path} and {held.spec.shape} here: another model")
    missing = sorted(n for n in step.store.buffer_names if f"model.{n}" not in tensors)
    if missing:
        raise UserError(f"{path} has no buffer {missing[0]}; it is of another model")
    kind, groups = type(step.optimizer).__name__, len(step.optimizer.param_groups)
    if (manifest["optimizer"], len(manifest["param_groups"])) != (kind, groups):
        raise UserError(
            f"{path} is of {manifest['optimizer']} with {len(manifest['param_groups'])} parameter groups, here it is "
            f"{kind} with {groups}; make the same optimizer"
        )


def _raise_together(trouble: str) -> None:
    """Raise on every rank if any has trouble: a rank that goes on alone would wait for the others until its timeout."""
    everywhere: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, trouble)
    first = next((text for text in everywhere if text), "")
    if first:
        raise UserError(first)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"a checkpoint names the dtype {name!r}, which torch does not have")
    return dtype
