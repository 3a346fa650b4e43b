"""DeepSpeed ZeRO 1, 2 and 3 on CPU ranks over gloo. Optional: ``pip install 'torch-autoplan[deepspeed]'``.

DeepSpeed clips gradients to norm 1 unless told otherwise, and its own fused AdamW is compiled where it first runs; here
nothing is clipped and torch's AdamW is handed in, as everywhere else. Buckets are of a size that suits small models.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.peer import Batch, Peer, Step, Task, Variant, divides, mean_over_ranks, micro_batches

BUCKET_ELEMENTS = 5_000_000


def prepare() -> str | None:
    """Import it for CPU ranks; why not, where it is absent."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; pip install 'torch-autoplan[deepspeed]'"
    os.environ["DS_ACCELERATOR"] = "cpu"  # read while it is imported
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Its shared-memory collectives would need a compiler, serve inference alone, and join hosts that are meant to be
    # apart.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return None


def configuration(task: Task, stage: int, count: int) -> dict[str, Any]:
    return {
        "train_batch_size": task.rows,
        "train_micro_batch_size_per_gpu": task.rows // task.ranks // count,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,  # needs streams
            "contiguous_gradients": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "steps_per_print": 10**9,
    }


def build(model: nn.Module, task: Task, *, stage: int, count: int) -> Step:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")  # takes the process group that is there
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=task.optimizer(model.parameters()), config=configuration(task, stage, count)
    )
    rank = dist.get_rank()

    def step(batch: Batch) -> Tensor:
        losses = []
        for part in micro_batches(batch, rank, task.ranks, count):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()  # a step of the optimizer only after the last micro-batch
            losses.append(loss.detach() / count)
        return mean_over_ranks(sum(losses[1:], losses[0]))

    return step


def variants(model: nn.Module, task: Task) -> tuple[Variant, ...]:
    choices = [(1, 1, False), (2, 1, False), (3, 1, False), (2, 4, True), (3, 4, True)]
    return tuple(
        Variant(
            name=f"ZeRO-{stage}" + (f", {count} micro-batches" if count > 1 else ""),
            build=partial(build, stage=stage, count=count),
            saves_memory=saves,
        )
        for stage, count, saves in choices
        if divides(task, task.ranks, count)
    )


PEER = Peer(name="DeepSpeed", what="DeepSpeed ZeRO", variants=variants, prepare=prepare)
