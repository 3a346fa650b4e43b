"""From a captured graph and a plan to the program of one rank: the passes in order, each checked after it ran.

specialize    batch and sequence become numbers
assign        every node's choice, every parameter's placement
cut           what belongs to this stage, and what crosses
split         forward and backward graphs; what is saved, made again, recomputed
redistribute  moves where placements differ
localize      the calls on this rank's pieces
zero          gathers of parameters, scatters of gradients, placed to overlap
fuse          collective and matmul beside it become one ring
order         in a split backward, what the stage before waits for comes first
reuse         results written over operands that nobody reads afterwards
finish        the StageProgram
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autoplan.capture.graph import Graph, Sizes
from autoplan.errors import LegalityError
from autoplan.plans import Plan
from autoplan.rewrite.assign import assign, check_assigned
from autoplan.rewrite.cut import check_cut, cut
from autoplan.rewrite.finish import finish
from autoplan.rewrite.fuse import check_fused, fuse
from autoplan.rewrite.localize import check_localized, localize
from autoplan.rewrite.order import check_ordered, order
from autoplan.rewrite.program import Coordinate, StageProgram
from autoplan.rewrite.redistribute import check_redistributed, redistribute
from autoplan.rewrite.reuse import check_reused, reuse
from autoplan.rewrite.specialize import check_specialized, specialize
from autoplan.rewrite.split import check_split, split
from autoplan.rewrite.state import State
from autoplan.rewrite.weight import weight_program
from autoplan.rewrite.zero import check_zero, zero

Pass = Callable[[State], State]
Check = Callable[[State], None]

PASSES: tuple[tuple[Pass, Check], ...] = (
    (specialize, check_specialized),
    (assign, check_assigned),
    (cut, check_cut),
    (split, check_split),
    (redistribute, check_redistributed),
    (localize, check_localized),
    (zero, check_zero),
    (fuse, check_fused),
    (order, check_ordered),
    (reuse, check_reused),
)


def rewrite(
    graph: Graph,
    plan: Plan,
    coordinate: Coordinate,
    groups: Mapping[str, str],
    device: torch.device | str | None = None,
) -> StageProgram:
    """The program of the rank at ``coordinate``.

    ``graph`` is unfolded. ``groups``: axis name ("data", "tensor") to process-group name, for axes of several ranks.
    ``device``: where calls that make tensors make them; None leaves it as captured.
    """
    state = State(
        graph=graph,
        plan=plan,
        coordinate=coordinate,
        groups=dict(groups),
        sizes=Sizes(batch=plan.micro_batch, seq=plan.fingerprint.seq),
        device=None if device is None else torch.device(device),
    )
    _check_arguments(state)
    for apply, check in PASSES:
        state = apply(state)
        check(state)
    return finish(state, weight_program(state))


def _check_arguments(state: State) -> None:
    """The caller must hand an unfolded graph, a coordinate on the mesh, and a group for every axis of several ranks."""
    if state.graph.folded:
        raise LegalityError("rewrite: the graph is folded; unfold it first")
    if len(state.plan.layers) != len(state.graph.layers):
        raise LegalityError(
            f"rewrite: the plan decides {len(state.plan.layers)} layers, the graph has {len(state.graph.layers)}"
        )
    for axis in ("pipe", "data", "tensor"):
        degree, place = getattr(state.plan.degrees, axis), getattr(state.coordinate, axis)
        if not 0 <= place < degree:
            raise LegalityError(f"rewrite: {axis} {place} is not one of {degree} ranks")
        if axis != "pipe" and degree > 1 and axis not in state.groups:
            raise LegalityError(f"rewrite: no process group is named for the {axis} axis of {degree} ranks")
