"""What else one could train with, each as its own documentation says: the same model, data, optimizer and precision.

peer             what a peer is, and what all of them share
anatomy          embedding, blocks and head of a Hugging Face causal model
ddp              torch DistributedDataParallel
fsdp2            torch fully_shard
tensor_parallel  torch parallelize_module, alone and with fully_shard
pipelining       torch.distributed.pipelining, stages cut by hand
deepspeed_zero   DeepSpeed ZeRO 1, 2 and 3
"""

from __future__ import annotations

from benchmarks.peers import ddp, deepspeed_zero, fsdp2, pipelining, tensor_parallel
from benchmarks.peers.peer import Peer

__all__ = ["PEERS", "Peer"]

PEERS: tuple[Peer, ...] = (ddp.PEER, fsdp2.PEER, tensor_parallel.PEER, pipelining.PEER, deepspeed_zero.PEER)
