"""Rank layout, groups, and where groups sit on nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.mesh import AXES, GroupShape, Mesh

meshes = st.builds(Mesh, pipe=st.integers(1, 5), data=st.integers(1, 6), tensor=st.integers(1, 6))
axis_sets = st.sets(st.sampled_from(AXES), min_size=1).map(lambda axes: tuple(sorted(axes, key=AXES.index)))


@given(meshes)
def test_rank_and_coords_are_inverse_and_tensor_is_innermost(mesh):
    assert [mesh.rank(*mesh.coords(rank)) for rank in range(mesh.size)] == list(range(mesh.size))
    assert [mesh.coords(rank) for rank in range(mesh.size)] == sorted(mesh.coords(rank) for rank in range(mesh.size))


@given(meshes, axis_sets)
def test_groups_partition_the_ranks_and_differ_only_in_their_axes(mesh, axes):
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert group == sorted(group)
        fixed = {
            tuple(c for axis, c in zip(AXES, mesh.coords(rank), strict=True) if axis not in axes) for rank in group
        }
        assert len(fixed) == 1


@given(meshes, axis_sets, st.integers(1, 9))
def test_group_shape_is_the_worst_group(mesh, axes, per_node):
    nodes = -(-mesh.size // per_node)
    cluster = Cluster.parse(f"{nodes}x{per_node}xcpu")
    shape = mesh.group_shape(axes, cluster)
    groups = mesh.groups(axes)
    counts = [
        [sum(cluster.node_of(rank) == node for rank in group) for node in {cluster.node_of(rank) for rank in group}]
        for group in groups
    ]
    assert shape.size == len(groups[0])
    assert shape.per_node == min(min(count) for count in counts)
    assert shape.nodes >= max(len(count) for count in counts)


def test_group_shape_examples():
    cluster = Cluster.parse("4x8xh100")
    mesh = Mesh(pipe=2, data=2, tensor=8)
    assert mesh.group_shape("tensor", cluster) == GroupShape(size=8, per_node=8)
    assert mesh.group_shape("data", cluster) == GroupShape(size=2, per_node=1)
    assert mesh.group_shape(("data", "tensor"), cluster) == GroupShape(size=16, per_node=8)
    assert Mesh(data=8, tensor=4).group_shape("data", cluster) == GroupShape(size=8, per_node=2)
    assert Mesh(data=8, tensor=4).group_shape("data", cluster).nodes == 4
    assert mesh.send_shape(0, cluster) == GroupShape.pair(inter=True)
    assert Mesh(pipe=4, tensor=2).send_shape(0, cluster) == GroupShape.pair(inter=False)
    assert GroupShape.whole(cluster) == GroupShape(size=32, per_node=8)


def test_refusals():
    cluster = Cluster.parse("8xh100")
    with pytest.raises(ClusterError, match="needs 16 devices but 1x8xh100-sxm has 8"):
        Mesh(data=16).group_shape("data", cluster)
    with pytest.raises(ClusterError, match="did you mean 'tensor'"):
        Mesh().groups("tensr")
    with pytest.raises(ClusterError, match="once"):
        Mesh().groups(("data", "data"))
    with pytest.raises(ClusterError, match="data must be a whole number"):
        Mesh(data=0)
    with pytest.raises(ClusterError, match="outside the mesh"):
        Mesh(data=2).coords(2)
    with pytest.raises(ClusterError, match="outside the mesh"):
        Mesh(data=2).rank(data=2)
    with pytest.raises(ClusterError, match="no next stage"):
        Mesh(pipe=2).send_shape(1, cluster)
    with pytest.raises(ClusterError, match="per_node"):
        GroupShape(size=2, per_node=3)
