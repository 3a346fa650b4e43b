"""What the inner search hands the outer one: the strategies of a layer class, priced.

The inner program (``layer_program``) solves one layer class on the tensor axis; the outer one (``stage_program``)
chooses for every layer a row of its class's table, a ZeRO stage and recompute, and cuts the pipeline. All figures are
for one micro-batch of ``sizes`` on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.capture.graph import Sizes
from autoplan.plans import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamUse:
    """One parameter as one layer holds it on one rank of the tensor axis."""

    name: str  # ParamInfo.name in the representative layer
    local_numel: int  # after tensor sharding, before ZeRO
    dim0: int  # local size of dim 0: ZeRO shards it, rounding up
    trainable: bool
    deferred: bool  # its gradient leaves Partial over the tensor axis and is summed once, at the end of the step
    tied: bool = False  # another layer uses it too


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyCost:
    """A strategy and its price."""

    strategy: Strategy
    sizes: Sizes
    tensor_degree: int
    forward_us: float  # compute + tensor-axis communication that is not hidden
    backward_us: float
    forward_comm_us: float  # the communication within forward_us
    backward_comm_us: float
    saved_bytes: int  # kept from forward to backward when nothing is recomputed
    boundary_bytes: int  # kept when the layer is recomputed: its boundary inputs
    transient_forward_bytes: int  # largest working set beside what is saved (liveness)
    transient_backward_bytes: int
    transient_recompute_bytes: int  # largest working set of recompute + backward
    output_bytes: int  # boundary values sent to the next stage, one rank
    params: tuple[ParamUse, ...]
    optimal: bool  # proved by the solver for its objective
    redistributions: tuple[
        tuple[str, str, str], ...
    ] = ()  # (value, from, to) that were priced; the rewrite must insert these
