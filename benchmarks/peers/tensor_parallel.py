"""torch parallelize_module: attention and MLP cut by columns, then rows, as Megatron does; alone, and with fully_shard.

GPT-2's ``Conv1D`` is a transposed ``nn.Linear`` that torch's styles do not know, and its query, key and value are one
matrix, which a plain column cut would mix. So each Conv1D becomes an ``nn.Linear`` with the same weights, and the
rows of the fused matrix are ordered so that a rank's slice is its own heads' query, key and value. The function is
unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.peers import fsdp2
from benchmarks.peers.anatomy import Anatomy, anatomy_of
from benchmarks.peers.peer import Batch, Peer, Step, Task, Variant, divides, mean_over_ranks, micro_batches

GPT2_BLOCK = {"attn.c_attn": "column", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
LLAMA_BLOCK = {
    "self_attn.q_proj": "column", "self_attn.k_proj": "column", "self_attn.v_proj": "column", "self_attn.o_proj": "row",
    "mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row",
}  # fmt: skip


def build(model: nn.Module, task: Task, *, tensor: int, count: int = 1) -> Step:
    """``tensor`` ranks next to each other cut every layer; fully_shard over what is left."""
    data = task.ranks // tensor
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    cut(model, mesh["tensor"])
    sharded = data > 1
    if sharded:
        fsdp2.shard(model, reshard=False, mesh=mesh["data"])
    optimizer = task.optimizer(model.parameters())
    place = mesh.get_local_rank("data")

    def step(batch: Batch) -> Tensor:
        losses = []
        for index, part in enumerate(micro_batches(batch, place, data, count)):
            if sharded:
                cast(FSDPModule, model).set_requires_gradient_sync(index == count - 1)
            loss = model(**part).loss / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(sum(losses[1:], losses[0]), mesh.get_group("data"))

    return step


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters by this rank's pieces."""
    anatomy = anatomy_of(model)
    assert anatomy is not None, "variants are made for known families only"
    fused = type(model).__name__ == "GPT2LMHeadModel"
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if kind == "column" else RowwiseParallel()
        for name, kind in (GPT2_BLOCK if fused else LLAMA_BLOCK).items()
    }
    for block in anatomy.blocks:
        if fused:
            _unfuse(cast(Any, block), mesh.size())
        parallelize_module(block, mesh, styles)
    _cut_ends(anatomy, mesh)


def _cut_ends(anatomy: Anatomy, mesh: DeviceMesh) -> None:
    """Embedding and head by rows of the vocabulary; one parameter again where they were tied."""
    parallelize_module(anatomy.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(anatomy.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if anatomy.tied:
        assert isinstance(anatomy.embedding.weight, DTensor)
        anatomy.head.weight = anatomy.embedding.weight


def _unfuse(block: Any, parts: int) -> None:
    """A GPT-2 block's Conv1D modules as Linear ones; the fused query, key and value ordered for ``parts`` ranks."""
    attention = block.attn
    width = attention.split_size
    rows = torch.arange(3 * width).view(3, parts, width // parts).transpose(0, 1).reshape(-1)
    attention.c_attn = _linear(attention.c_attn, rows)
    attention.split_size = width // parts
    attention.c_proj = _linear(attention.c_proj)
    block.mlp.c_fc = _linear(block.mlp.c_fc)
    block.mlp.c_proj = _linear(block.mlp.c_proj)


def _linear(convolution: Any, rows: Tensor | None = None) -> nn.Linear:
    """The same function; ``rows``: the order of its outputs."""
    weight, bias = convolution.weight.detach().T, convolution.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    made.bias = nn.Parameter(bias.clone())
    return made


def variants(model: nn.Module, task: Task) -> tuple[Variant, ...]:
    if anatomy_of(model) is None:
        return ()
    heads = _heads(model)
    found = []
    for tensor in sorted({task.ranks, 2}, reverse=True):
        data = task.ranks // tensor
        if tensor < 2 or task.ranks % tensor or any(count % tensor for count in heads):
            continue
        name = f"tensor {tensor}" + (f" × fully_shard {data}" if data > 1 else "")
        if divides(task, data, 1):
            found.append(Variant(name=name, build=partial(build, tensor=tensor)))
        if divides(task, data, 4):
            build_4 = partial(build, tensor=tensor, count=4)
            found.append(Variant(name=f"{name}, 4 micro-batches", build=build_4, saves_memory=True))
    return tuple(sorted(found, key=lambda variant: variant.saves_memory))


def _heads(model: nn.Module) -> list[int]:
    config = cast(Any, model).config
    return [config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads]


PEER = Peer(name="tensor parallel", what="torch parallelize_module", variants=variants)
