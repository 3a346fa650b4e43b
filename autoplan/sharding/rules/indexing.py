"""Look-ups: embeddings, gathers, advanced indexing. Cut along the looked-up dim, each rank answers for its own rows."""

from __future__ import annotations

from autoplan.sharding.factors import ONE
from autoplan.sharding.registry import Call, Dims, numbered, rule
from autoplan.sharding.rule import Dim, Rule
from autoplan.sharding.rules.pointwise import aligned


@rule("aten.embedding.default")
def embedding(call: Call) -> Rule:
    """``v d, t0 t1 -> t0 t1 d``. With v sharded a rank looks up the tokens it holds, zero elsewhere: Partial."""
    tokens = numbered("t", call.shape("indices"))
    operands: dict[str, Dims] = {"weight": (("v",), ("d",)), "indices": tokens}
    return call.rule(operands, [(*tokens, ("d",))], linear=[("weight",)], lowered={"v": "embedding"})


@rule("aten.embedding_dense_backward.default")
def embedding_backward(call: Call) -> Rule | None:
    """``t0 t1 d, t0 t1 -> v d``: tokens are summed. Scaling by frequency needs all tokens, so it is replicated."""
    if call.arg("scale_grad_by_freq"):
        return None
    tokens = numbered("t", call.shape("indices"))
    operands: dict[str, Dims] = {"grad_output": (*tokens, ("d",)), "indices": tokens}
    return call.rule(operands, [(("v",), ("d",))], linear=[("grad_output",)], lowered={"v": "embedding_backward"})


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(call: Call) -> Rule | None:
    """Indexed dims are fixed, the dims of the index and the untouched dims are free."""
    shape = call.shape("self")
    given = call.arg("indices")
    if any(i is not None and not i.meta["specs"][0].dtype.is_signed for i in given):
        return None  # a mask: the result's shape depends on the data
    at = [i for i, n in enumerate(given) if n is not None]
    together = at == list(range(at[0], at[-1] + 1))
    ranks = [len(given[i].meta["specs"][0].shape) for i in at]
    result = call.results()[0]
    first = at[0] if together else 0
    letters = numbered("t", result[first : first + max(ranks)])
    own: Dims = tuple((f"x{i}",) if i in at else () if size == ONE else (f"d{i}",) for i, size in enumerate(shape))
    free: list[Dim] = [d for i, d in enumerate(own) if i not in at]
    operands: dict[str, Dims | list[Dims]] = {
        "self": own,
        "indices": [_index_dims(letters, n) for n in given],
    }
    return call.rule(
        operands, [(*free[:first], *letters, *free[first:])], fixed=[f"x{i}" for i in at], linear=[("self",)]
    )


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(call: Call) -> Rule | None:
    """``x d, t, t d -> x d``: the dims behind the indexed ones are free, if those come first."""
    shape, indices = call.shape("self"), call.arg("indices")
    at = [i for i, n in enumerate(indices) if n is not None]
    if at != list(range(len(at))) or any(not indices[i].meta["specs"][0].dtype.is_signed for i in at):
        return None
    ranks = [len(indices[i].meta["specs"][0].shape) for i in at]
    behind = len(shape) - len(at)
    tail = numbered("d", shape[len(at) :], len(at))
    own: Dims = (*((f"x{i}",) for i in at), *tail)
    given = call.shape("values")
    letters: Dims = (*((f"v{i}",) for i in range(max(len(given) - behind, 0))), *tail)
    operands: dict[str, Dims | list[Dims]] = {
        "self": own,
        "values": aligned(letters, given),
        "indices": [tuple((f"i{j}_{i}",) for i in range(rank)) for j, rank in enumerate(ranks)],
    }
    dims = (*letters, *own, *(d for index in operands["indices"] for d in index))
    fixed = {letter for dim in dims for letter in dim if letter[0] in "xvi"}
    return call.rule(operands, [own], fixed=fixed, linear=[("self", "values")])


@rule("aten.gather.default")
def gather(call: Call) -> Rule:
    """Dims that index and source share are free, all others (the gathered one too, on the source's side) are fixed."""
    source, index = call.shape("self"), call.shape("index")
    dim = call.dim(call.arg("dim"), len(source))
    free = [i != dim and a == b for i, (a, b) in enumerate(zip(source, index, strict=True))]
    result = tuple((f"d{i}",) if ok or i == dim else (f"y{i}",) for i, ok in enumerate(free))
    own = tuple((f"d{i}",) if ok else (f"x{i}",) for i, ok in enumerate(free))
    fixed = [f"{c}{i}" for i, ok in enumerate(free) if not ok for c in "xy"]
    return call.rule({"self": own, "index": result}, [result], fixed=fixed, linear=[("self",)])


@rule("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def scatter(call: Call) -> Rule:
    """Dims other than the scattered one that all tensors share are free."""
    shapes = [node.meta["specs"][0].shape for _, _, node in call.tensors()]
    whole = call.results()[0]
    dim = call.dim(call.arg("dim"), len(whole))
    free = [i != dim and len({s[i] for s in shapes}) == 1 for i in range(len(whole))]
    operands: dict[str, Dims] = {
        name: tuple((f"d{i}",) if ok else (f"{name}{i}",) for i, ok in enumerate(free)) for name, _, _ in call.tensors()
    }
    fixed = [f"{name}{i}" for name in operands for i, ok in enumerate(free) if not ok]
    adds = "scatter_add" in str(call.node.target)
    linear = [("self", "src")] if adds or call.arg("src") is not None else []
    return call.rule(operands, [operands["self"]], fixed=fixed, linear=linear)


def _index_dims(letters: Dims, node: object) -> Dims:
    return () if node is None else aligned(letters, node.meta["specs"][0].shape)  # type: ignore[attr-defined]
