"""The process groups of a plan: pipe outermost, data, tensor innermost (the layout is ``cost_models.mesh.Mesh``'s)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoplan.errors import DegreeError
from autoplan.plans import Degrees
from autoplan.rewrite.program import Coordinate

AXES = ("pipe", "data", "tensor")
STAGE = "stage"  # the group of all ranks of one pipeline stage: data and tensor axes together
BACK = "back"  # the pipe axis again, for what goes towards its first stage (``passage``)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """This rank's place on the mesh, and a process group for every axis.

    ``stage_mesh`` has the axes (tensor, data) in that order, so that DTensor placements ``[tensor placement,
    Shard(0)]`` mean: cut by the tensor axis first, then each piece's rows over the data axis.
    """

    degrees: Degrees
    coordinate: Coordinate
    device: torch.device
    mesh: DeviceMesh
    stage_mesh: DeviceMesh
    groups: Mapping[str, dist.ProcessGroup]  # "pipe", "data", "tensor", "stage", "back"

    @property
    def group_names(self) -> dict[str, str]:
        """Axis to the name by which the collectives in a graph find its group; for axes that cut something."""
        return {axis: self.groups[axis].group_name for axis in ("data", "tensor") if self.degree(axis) > 1}

    def degree(self, axis: str) -> int:
        return self.degrees.data * self.degrees.tensor if axis == STAGE else self.degrees.mesh.degree(axis)

    def close(self) -> None:
        """Tear the groups down, with their threads and connections; for a process that runs one plan after another.

        Every rank of the mesh calls it, and none leaves before all have come: a peer may still be reading.
        """
        dist.barrier()
        for group in dict.fromkeys(self.groups.values()):
            dist.destroy_process_group(group)

    @property
    def is_first_stage(self) -> bool:
        return self.coordinate.pipe == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinate.pipe == self.degrees.pipe - 1


def coordinate_of(rank: int, degrees: Degrees) -> Coordinate:
    pipe, data, tensor = degrees.mesh.coords(rank)
    return Coordinate(pipe=pipe, data=data, tensor=tensor)


def build_axes(degrees: Degrees, device: torch.device, timeout_s: float) -> Axes:
    """Make every group. All ranks of the default process group call this, once for each plan they run."""
    world = dist.get_world_size()
    if world != degrees.size:
        raise DegreeError(
            f"the plan is for {degrees.size} ranks ({degrees}), {world} were started; start {degrees.size}"
        )
    coordinate = coordinate_of(dist.get_rank(), degrees)
    groups = {axis: _own_group(degrees, (axis,), timeout_s) for axis in AXES}
    groups[STAGE] = _own_group(degrees, ("data", "tensor"), timeout_s)
    groups[BACK] = _own_group(degrees, ("pipe",), timeout_s) if degrees.pipe > 1 else groups["pipe"]
    ranks = torch.arange(world, dtype=torch.int).view(degrees.pipe, degrees.data, degrees.tensor)
    return Axes(
        degrees=degrees,
        coordinate=coordinate,
        device=device,
        mesh=DeviceMesh.from_group([groups[axis] for axis in AXES], device.type, ranks, mesh_dim_names=AXES),
        stage_mesh=DeviceMesh.from_group(
            [groups["tensor"], groups["data"]],
            device.type,
            ranks[coordinate.pipe].T.contiguous(),
            mesh_dim_names=("tensor", "data"),
        ),
        groups=groups,
    )


def _own_group(degrees: Degrees, axes: tuple[str, ...], timeout_s: float) -> dist.ProcessGroup:
    """Make the groups of these axes, in the same order on every rank, and return the one this rank is in."""
    timeout = datetime.timedelta(seconds=timeout_s)  # without it torch would fall back to its own default
    own: dist.ProcessGroup | None = None
    for ranks in degrees.mesh.groups(axes):
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None, "every rank is in one group of each axis"
    return own
