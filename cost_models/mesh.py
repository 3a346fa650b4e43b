"""The device mesh: how ranks are laid out over the pipe, data and tensor axes, and where a group's members sit.

Pipe is the outermost axis and tensor the innermost, so that tensor groups, which communicate most, are consecutive
ranks and fall inside a node; pipe neighbours, which communicate least, are furthest apart:

    rank = (pipe_index * data + data_index) * tensor + tensor_index
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import check_count, nearest

AXES = ("pipe", "data", "tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShape:
    """How one group's members sit on nodes: ``size`` members, ``per_node`` of them on each node.

    All that a collective's time depends on. Where the members are spread unevenly, ``per_node`` is the fewest on a node
    they touch, which can only overstate the time.
    """

    size: int
    per_node: int

    def __post_init__(self) -> None:
        check_count("GroupShape", "size", self.size)
        check_count("GroupShape", "per_node", self.per_node)
        if self.per_node > self.size:
            raise ClusterError(f"GroupShape: per_node {self.per_node} exceeds the group's size {self.size}; lower it")

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.per_node)

    @classmethod
    def of(cls, ranks: Sequence[int], cluster: Cluster) -> "GroupShape":
        """These ranks, as they sit on the nodes of ``cluster``."""
        return cls(size=len(ranks), per_node=min(Counter(map(cluster.node_of, ranks)).values()))

    @classmethod
    def pair(cls, *, inter: bool) -> "GroupShape":
        """Two devices, on two nodes or on one."""
        return cls(size=2, per_node=1 if inter else 2)

    @classmethod
    def whole(cls, cluster: Cluster) -> "GroupShape":
        """Every device of the cluster."""
        return cls(size=cluster.size, per_node=cluster.devices_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Degrees of the three axes; the module docstring gives the rank layout."""

    pipe: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            check_count("Mesh", axis, self.degree(axis))

    @property
    def size(self) -> int:
        return self.pipe * self.data * self.tensor

    def degree(self, axis: str) -> int:
        """Members along one axis."""
        if axis not in AXES:
            raise ClusterError(f"no mesh axis is called {axis!r}; {nearest(axis, AXES)}")
        return int(getattr(self, axis))

    def rank(self, pipe: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The rank at these coordinates."""
        for axis, index in zip(AXES, (pipe, data, tensor), strict=True):
            if not 0 <= index < self.degree(axis):
                raise ClusterError(f"{axis} index {index} is outside the mesh; give 0 to {self.degree(axis) - 1}")
        return (pipe * self.data + data) * self.tensor + tensor

    ranks = rank  # reads better with keywords: mesh.ranks(pipe=1, data=0)

    def coords(self, rank: int) -> tuple[int, int, int]:
        """(pipe, data, tensor) indices of a rank."""
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank {rank} is outside the mesh; give 0 to {self.size - 1}")
        rest, tensor = divmod(rank, self.tensor)
        pipe, data = divmod(rest, self.data)
        return pipe, data, tensor

    def groups(self, axes: str | Sequence[str]) -> list[list[int]]:
        """The process groups of one axis, or of several combined: members differ only in those axes, in rank order."""
        return [[int(rank) for rank in row] for row in self._group_rows(_axis_tuple(axes))]

    def _group_rows(self, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
        kept = [position for position, axis in enumerate(AXES) if axis not in axes]
        inside = [position for position, axis in enumerate(AXES) if axis in axes]
        ranks = np.arange(self.size, dtype=np.int64).reshape(self.pipe, self.data, self.tensor)
        members = int(np.prod([self.degree(AXES[position]) for position in inside], dtype=np.int64))
        return ranks.transpose(kept + inside).reshape(-1, members)

    def group_shape(self, axes: str | Sequence[str], cluster: Cluster) -> GroupShape:
        """The worst group of these axes on ``cluster``: the one that spans most nodes.

        Groups that work at the same moment share a node's network (the data groups of each tensor rank, say). Each
        device has its own share of that network (``Cluster.inter`` is per device), so nothing is divided here; that
        assumes that all devices of a node are equally busy, and is pessimistic when only some are.
        """
        return _group_shape(self, _axis_tuple(axes), cluster)

    def send_shape(self, stage: int, cluster: Cluster) -> GroupShape:
        """The worst pair of ranks that pass activations from ``stage`` to ``stage + 1``."""
        if not 0 <= stage < self.pipe - 1:
            raise ClusterError(f"stage {stage} has no next stage; give 0 to {self.pipe - 2}")
        self._check_fits(cluster)
        stride = self.data * self.tensor
        inter = any(
            cluster.node_of(rank) != cluster.node_of(rank + stride)
            for rank in range(stage * stride, (stage + 1) * stride)
        )
        return GroupShape.pair(inter=inter)

    def _check_fits(self, cluster: Cluster) -> None:
        if self.size > cluster.size:
            raise ClusterError(
                f"mesh {self} needs {self.size} devices but {cluster} has {cluster.size}; lower a degree"
            )

    def __str__(self) -> str:
        return f"pipe={self.pipe} data={self.data} tensor={self.tensor}"


def _axis_tuple(axes: str | Sequence[str]) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in names:
        if axis not in AXES:
            raise ClusterError(f"no mesh axis is called {axis!r}; {nearest(axis, AXES)}")
    if not names or len(set(names)) != len(names):
        raise ClusterError(f"name each mesh axis once, of {', '.join(AXES)}; not {names!r}")
    return names


@functools.lru_cache(maxsize=4096)
def _group_shape(mesh: Mesh, axes: tuple[str, ...], cluster: Cluster) -> GroupShape:
    mesh._check_fits(cluster)
    rows = mesh._group_rows(axes)
    nodes = rows // cluster.devices_per_node
    size = rows.shape[1]
    # Many groups have the same pattern of nodes; look at each pattern once.
    patterns = np.unique(nodes - nodes[:, :1], axis=0)
    fewest = min(int(np.unique(pattern, return_counts=True)[1].min()) for pattern in patterns)
    return GroupShape(size=size, per_node=fewest)
