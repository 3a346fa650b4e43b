"""Every rule against shard-and-recombine: all choices of an op, at degrees 2, 3 and 4, on drawn sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

import autoplan.capture.attention  # noqa: F401  (defines autoplan::attention)
from autoplan.capture.graph import Sizes
from autoplan.sharding import has_rule, refine, verify_choice

from .models import T, bools, ints, single

aten = torch.ops.aten
SIZES = Sizes(batch=1)
Dim = Callable[[], int]

# name -> (node from a source of dim sizes, names of letters that must be shardable when their size allows)
CASES: dict[str, tuple[Callable[[Dim], fx.Node], tuple[str, ...]]] = {}


def case(*letters: str) -> Callable[[Callable[[Dim], fx.Node]], Callable[[Dim], fx.Node]]:
    def add(build: Callable[[Dim], fx.Node]) -> Callable[[Dim], fx.Node]:
        CASES[build.__name__] = (build, letters)
        return build

    return add


# -- contraction


@case("m", "k", "n")
def mm(d: Dim) -> fx.Node:
    m, k, n = d(), d(), d()
    return single(aten.mm.default, T(m, k), T(k, n))


@case("b", "m", "k", "n")
def bmm(d: Dim) -> fx.Node:
    b, m, k, n = d(), d(), d(), d()
    return single(aten.bmm.default, T(b, m, k), T(b, k, n))


@case("m", "k", "n")
def addmm(d: Dim) -> fx.Node:
    m, k, n = d(), d(), d()
    return single(aten.addmm.default, T(n), T(m, k), T(k, n), beta=2.0, alpha=3.0)


@case("m", "k", "n")
def addmm_full_bias(d: Dim) -> fx.Node:
    m, k, n = d(), d(), d()
    return single(aten.addmm.default, T(m, n), T(m, k), T(k, n))


@case("b", "m", "k", "n")
def baddbmm(d: Dim) -> fx.Node:
    b, m, k, n = d(), d(), d(), d()
    return single(aten.baddbmm.default, T(b, 1, n), T(b, m, k), T(b, k, n))


@case("m", "k")
def mv(d: Dim) -> fx.Node:
    m, k = d(), d()
    return single(aten.mv.default, T(m, k), T(k))


@case("k")
def dot(d: Dim) -> fx.Node:
    k = d()
    return single(aten.dot.default, T(k), T(k))


# -- pointwise


@case("d0", "d1", "d2")
def add_broadcast(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.add.Tensor, T(a, 1, c), T(b, 1), alpha=2)


@case("d0")
def add_number(d: Dim) -> fx.Node:
    return single(aten.add.Tensor, T(d(), 3), 1.5)


@case("d0", "d1")
def mul(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.mul.Tensor, T(a, b), T(b))


@case("d0", "d1")
def div(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.div.Tensor, T(a, b), T(a, 1))


@case("d0")
def div_number(d: Dim) -> fx.Node:
    return single(aten.div.Scalar, T(d(), 2), 7)


@case("d0", "d1")
def where(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.where.self, bools(a, b), T(a, b), T())


@case("d0", "d1")
def addcmul(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.addcmul.default, T(a, b), T(b), T(a, b), value=0.5)


@case("d0")
def masked_fill(d: Dim) -> fx.Node:
    a = d()
    return single(aten.masked_fill.Scalar, T(a, 3), bools(a, 1), 0)


@case("d0")
def to_copy_wide(d: Dim) -> fx.Node:
    return single(aten._to_copy.default, T(d(), 3, dtype=torch.bfloat16), dtype=torch.float32)


@case("d0")
def to_copy_narrow(d: Dim) -> fx.Node:
    return single(aten._to_copy.default, T(d(), 3), dtype=torch.bfloat16)


UNARY = ("neg", "exp", "tanh", "sigmoid", "silu", "gelu", "relu", "rsqrt", "sqrt", "log", "sin", "cos", "abs", "clone",
         "detach", "erf", "reciprocal", "isnan", "logical_not", "softplus", "sgn", "hardtanh")  # fmt: skip
BINARY = ("eq.Tensor", "le.Tensor", "maximum.default", "pow.Tensor_Tensor", "sub.Tensor", "logical_and.default")
BACKWARD = ("tanh_backward.default", "sigmoid_backward.default", "silu_backward.default", "gelu_backward.default")


def _pointwise(op: torch._ops.OpOverload, operands: int) -> Callable[[Dim], fx.Node]:
    def build(d: Dim) -> fx.Node:
        a, b = d(), d()
        return single(op, *(T(a, b) for _ in range(operands)))

    return build


for _name in UNARY:
    CASES[_name] = (_pointwise(getattr(aten, _name).default, 1), ("d0", "d1"))
for _name in (*BINARY, *BACKWARD):
    _packet, _overload = _name.split(".")
    CASES[_name] = (_pointwise(getattr(getattr(aten, _packet), _overload), 2), ("d0", "d1"))


@case("d0", "d1")
def threshold_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.threshold_backward.default, T(a, b), T(a, b), 0)


@case("d0")
def pow_number(d: Dim) -> fx.Node:
    return single(aten.pow.Tensor_Scalar, T(d()), 3.0)


# -- views


@case("d0", "d1", "d2")
def view_split(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.view.default, T(a * b, c), [a, b, c])


@case("d0", "d2")
def view_merge(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.reshape.default, T(a, b, 1, c), [a * b, -1])


@case("d0", "d1", "d2")
def view_regroup(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.reshape.default, T(a * b, c), [a, b * c])


@case()
def view_unrelated(d: Dim) -> fx.Node:
    a = d()
    return single(aten.view.default, T(a + 1, a), [a, a + 1])


@case("d0", "d1", "d2")
def permute(d: Dim) -> fx.Node:
    return single(aten.permute.default, T(d(), d(), d()), [2, 0, -2])


@case("d0", "d1", "d2")
def transpose(d: Dim) -> fx.Node:
    return single(aten.transpose.int, T(d(), d(), d()), -1, 0)


@case("d0", "d1")
def t(d: Dim) -> fx.Node:
    return single(aten.t.default, T(d(), d()))


@case("d0", "d1")
def unsqueeze(d: Dim) -> fx.Node:
    return single(aten.unsqueeze.default, T(d(), d()), -2)


@case("d0", "d2")
def squeeze_dim(d: Dim) -> fx.Node:
    return single(aten.squeeze.dim, T(d(), 1, d()), -2)


@case("d0", "d3")
def squeeze_dims(d: Dim) -> fx.Node:
    return single(aten.squeeze.dims, T(d(), 1, 1, d()), [1, 3])


@case("d0", "d1", "d2")
def expand(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.expand.default, T(b, 1), [a, b, c])


@case("d", "d1")
def slice_piece(d: Dim) -> fx.Node:
    a = d()
    return single(aten.slice.Tensor, T(3 * a, d()), 0, a, 2 * a)


@case("d", "d1")
def slice_two_of_three(d: Dim) -> fx.Node:
    a = 2 * d()
    return single(aten.slice.Tensor, T(3 * a, d()), 0, -2 * a)


@case("d0", "d")
def slice_all(d: Dim) -> fx.Node:
    return single(aten.slice.Tensor, T(d(), d()), 1, 0, 2**63 - 1)


@case("d1")
def slice_uneven(d: Dim) -> fx.Node:
    return single(aten.slice.Tensor, T(d() + 2, d()), 0, 1)


@case("d1")
def slice_step(d: Dim) -> fx.Node:
    return single(aten.slice.Tensor, T(2 * d() + 3, d()), 0, 1, -1, 2)


@case("d", "d0")
def slice_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.slice_backward.default, T(a, b), [a, 4 * b], 1, 2 * b, 3 * b, 1)


@case("d0", "d2")
def slice_scatter(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.slice_scatter.default, T(a, 6, b), T(a, 3, b), 1, 2, 5)


@case("d1")
def select_scatter(d: Dim) -> fx.Node:
    a = d()
    return single(aten.select_scatter.default, T(4, a), T(a), 0, 2)


@case("d", "d0")
def split(d: Dim) -> fx.Node:
    a = d()
    return single(aten.split.Tensor, T(d(), 3 * a), a, -1)


@case("d", "d0")
def split_uneven(d: Dim) -> fx.Node:
    a = 2 * d()
    return single(aten.split_with_sizes.default, T(d(), 6 * a), [4 * a, a, a], 1)


@case("d", "d0")
def chunk(d: Dim) -> fx.Node:
    return single(aten.chunk.default, T(d(), 4 * d()), 2, 1)


@case("d", "d0")
def cat(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.cat.default, [T(a, b), T(a, b), T(a, b)], 1)


@case("d0")
def cat_uneven(d: Dim) -> fx.Node:
    a = d()
    return single(aten.cat.default, [T(a, 2), T(a, 3)], 1)


@case("d0", "d2")
def stack(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.stack.default, [T(a, b), T(a, b)], 1)


@case("d0", "d2")
def select(d: Dim) -> fx.Node:
    return single(aten.select.int, T(d(), 3, d()), 1, -1)


@case("d0", "d2")
def select_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.select_backward.default, T(a, b), [a, 3, b], 1, 2)


@case("d1")
def unbind(d: Dim) -> fx.Node:
    return single(aten.unbind.int, T(3, d()), 0)


@case("d0")
def constant_pad_nd(d: Dim) -> fx.Node:
    return single(aten.constant_pad_nd.default, T(d(), 4), [0, 1], 0.0)


@case("d0")
def constant_pad_nd_value(d: Dim) -> fx.Node:
    return single(aten.constant_pad_nd.default, ints(d(), 4), [1, -2], -100)


@case("d1")
def repeat(d: Dim) -> fx.Node:
    return single(aten.repeat.default, T(d(), 1), [2, 3, 1])


@case("d0")
def slice_of_nothing(d: Dim) -> fx.Node:
    return single(aten.slice.Tensor, T(d(), 4), 1, 4)


@case("d", "d0")
def cat_with_nothing(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.cat.default, [T(a, b), T(a, 0), T(a, b)], 1)


@case("d1")
def flip(d: Dim) -> fx.Node:
    return single(aten.flip.default, T(3, d()), [0])


@case("d0")
def tril(d: Dim) -> fx.Node:
    return single(aten.tril.default, T(d(), 4, 4))


# -- reductions and scans


@case("d0", "d1", "d2")
def sum_dims(d: Dim) -> fx.Node:
    return single(aten.sum.dim_IntList, T(d(), d(), d()), [0, -1], True)


@case("d0", "d1")
def sum_all(d: Dim) -> fx.Node:
    return single(aten.sum.default, T(d(), d()))


@case("d0", "d1")
def mean_dim(d: Dim) -> fx.Node:
    return single(aten.mean.dim, T(d(), d()), [-1], True)


@case("d0", "d1")
def mean_all(d: Dim) -> fx.Node:
    return single(aten.mean.default, T(d(), d()))


@case("d0")
def amax(d: Dim) -> fx.Node:
    return single(aten.amax.default, T(d(), 4), [1])


@case("d0")
def max_dim(d: Dim) -> fx.Node:
    return single(aten.max.dim, T(d(), 4), 1)


@case("d0")
def var_mean(d: Dim) -> fx.Node:
    return single(aten.var_mean.correction, T(d(), 4), [1], correction=0, keepdim=True)


@case("d0")
def any_dim(d: Dim) -> fx.Node:
    return single(aten.any.dim, bools(d(), 4), 1)


@case("d0")
def cumsum(d: Dim) -> fx.Node:
    return single(aten.cumsum.default, T(d(), 4), 1)


@case("d1")
def topk(d: Dim) -> fx.Node:
    return single(aten.topk.default, T(4, d()), 2, 0)


@case("d0")
def sort(d: Dim) -> fx.Node:
    return single(aten.sort.default, T(d(), 4))


# -- normalization


@case("d0", "d1", "d2")
def softmax(d: Dim) -> fx.Node:
    return single(aten._softmax.default, T(d(), d(), d()), 1, False)


@case("d0", "d1")
def safe_softmax(d: Dim) -> fx.Node:
    return single(aten._safe_softmax.default, T(d(), d()), -1)


@case("d0", "d1")
def log_softmax(d: Dim) -> fx.Node:
    return single(aten._log_softmax.default, T(d(), d()), 1, False)


@case("d0", "d1")
def softmax_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten._softmax_backward_data.default, T(a, b), T(a, b), -1, torch.float32)


@case("d0", "d1")
def log_softmax_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten._log_softmax_backward_data.default, T(a, b), T(a, b), 1, torch.float32)


@case("d0", "d1")
def layer_norm(d: Dim) -> fx.Node:
    a, b, c = d(), d(), 5
    return single(aten.native_layer_norm.default, T(a, b, c), [c], T(c), T(c), 1e-5)


@case("d0")
def layer_norm_plain(d: Dim) -> fx.Node:
    return single(aten.native_layer_norm.default, T(d(), 2, 3), [2, 3], None, None, 1e-5)


@case("d0", "d1")
def layer_norm_backward(d: Dim) -> fx.Node:
    a, b, c = d(), d(), 5
    args = (T(a, b, c), T(a, b, c), [c], T(a, b, 1), T(a, b, 1), T(c), T(c))
    return single(aten.native_layer_norm_backward.default, *args, [True, True, True])


@case("d0")
def layer_norm_backward_frozen_input(d: Dim) -> fx.Node:
    a, c = d(), 5
    args = (T(a, c), T(a, c), [c], T(a, 1), T(a, 1), T(c), T(c))
    return single(aten.native_layer_norm_backward.default, *args, [False, True, True])


# -- look-ups


@case("v", "d", "t0", "t1")
def embedding(d: Dim) -> fx.Node:
    return single(aten.embedding.default, T(d(), d()), ints(d(), d()), 0)


@case("v", "d", "t0", "t1")
def embedding_backward(d: Dim) -> fx.Node:
    a, b, c = d(), d(), d()
    return single(aten.embedding_dense_backward.default, T(a, b, c), ints(a, b), d(), -1, False)


@case("v")
def embedding_backward_padded(d: Dim) -> fx.Node:
    a, c = 9, d()
    return single(aten.embedding_dense_backward.default, T(a, c), ints(a), d(), 0, False)


@case("t0", "d1")
def index(d: Dim) -> fx.Node:
    return single(aten.index.Tensor, T(4, d()), [ints(d())])


@case("t0", "t1", "d0")
def index_two(d: Dim) -> fx.Node:
    return single(aten.index.Tensor, T(d(), 4, 3), [None, ints(d(), 1), ints(d())])


@case("t0", "d1")
def index_apart(d: Dim) -> fx.Node:
    a = d()
    return single(aten.index.Tensor, T(4, d(), 3), [ints(a), None, ints(a)])


@case("d0")
def gather(d: Dim) -> fx.Node:
    a = d()
    return single(aten.gather.default, T(a, 5), 1, ints(a, 2))


@case("d0")
def scatter_value(d: Dim) -> fx.Node:
    a = d()
    return single(aten.scatter.value, T(a, 5), 1, ints(a, 1), 2.0)


@case("d1")
def scatter_add(d: Dim) -> fx.Node:
    a = d()
    return single(aten.scatter_add.default, T(5, a), 0, ints(7, a), T(7, a))


@case("d1")
def index_put(d: Dim) -> fx.Node:
    a = d()
    return single(aten.index_put.default, T(5, a), [ints(3)], T(3, a))


@case("d1")
def index_put_accumulate(d: Dim) -> fx.Node:
    a = d()
    return single(aten.index_put.default, T(5, a), [ints(7)], T(7, a), True)


# -- pictures


@case("n", "o")
def convolution(d: Dim) -> fx.Node:
    n, c, o = d(), d(), d()
    args = (T(n, c, 6, 5), T(o, c, 3, 2), T(o), [2, 1], [1, 0], [1, 1], False, [0, 0], 1)
    return single(aten.convolution.default, *args)


@case("n", "c", "o")
def convolution_without_bias(d: Dim) -> fx.Node:
    n, c, o = d(), d(), d()
    args = (T(n, c, 6, 5), T(o, c, 3, 2), None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1)
    return single(aten.convolution.default, *args)


@case("n")
def convolution_grouped(d: Dim) -> fx.Node:
    args = (T(d(), 4, 6), T(8, 2, 3), T(8), [1], [0], [1], False, [0], 2)
    return single(aten.convolution.default, *args)


@case("n", "c", "o")
def convolution_backward(d: Dim) -> fx.Node:
    n, c, o = d(), d(), d()
    args = (T(n, o, 4, 4), T(n, c, 6, 5), T(o, c, 3, 2), [o], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return single(aten.convolution_backward.default, *args, [True, True, True])


@case("n", "c")
def max_pool(d: Dim) -> fx.Node:
    return single(aten.max_pool2d_with_indices.default, T(d(), d(), 6, 6), [2, 2], [2, 2])


@case("n", "c")
def adaptive_pool_backward(d: Dim) -> fx.Node:
    n, c = d(), d()
    return single(aten._adaptive_avg_pool2d_backward.default, T(n, c, 1, 1), T(n, c, 4, 4))


@case("n", "c")
def batch_norm_training(d: Dim) -> fx.Node:
    n, c = d(), d()
    args = (T(n, c, 3, 2), T(c), T(c), T(c), T(c), True, 0.1, 1e-5)
    return single(aten._native_batch_norm_legit_functional.default, *args)


@case("n", "c")
def batch_norm_in_use(d: Dim) -> fx.Node:
    n, c = d(), d()
    args = (T(n, c, 3, 2), T(c), T(c), T(c), T(c), 0.1, 1e-5)
    return single(aten._native_batch_norm_legit_no_training.default, *args)


@case("n", "c")
def batch_norm_backward(d: Dim) -> fx.Node:
    n, c = d(), d()
    args = (T(n, c, 3, 2), T(n, c, 3, 2), T(c), T(c), T(c), T(c), T(c), True, 1e-5, [True, True, True])
    return single(aten.native_batch_norm_backward.default, *args)


@case("n", "c")
def batch_norm_backward_frozen(d: Dim) -> fx.Node:
    n, c = d(), d()
    args = (T(n, c, 3), T(n, c, 3), None, None, None, T(c), T(c), True, 1e-5, [True, False, False])
    return single(aten.native_batch_norm_backward.default, *args)


@case("n")
def group_norm(d: Dim) -> fx.Node:
    n = d()
    return single(aten.native_group_norm.default, T(n, 4, 3), T(4), T(4), n, 4, 3, 2, 1e-5)


@case("n")
def group_norm_backward(d: Dim) -> fx.Node:
    n = d()
    args = (T(n, 4, 3), T(n, 4, 3), T(n, 2), T(n, 2), T(4), n, 4, 3, 2, [True, True, True])
    return single(aten.native_group_norm_backward.default, *args)


# -- loss


@case("n", "c")
def nll_mean(d: Dim) -> fx.Node:
    a = d()
    return single(aten.nll_loss_forward.default, T(a, d()), ints(a), None, 1, 0)


@case("n", "c")
def nll_mean_weighted(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten.nll_loss_forward.default, T(a, c), ints(a), T(c), 1, -100)


@case("n", "c")
def nll_sum(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten.nll_loss_forward.default, T(a, c), ints(a), T(c), 2, 1)


@case("n", "c")
def nll_none(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten.nll_loss_forward.default, T(a, c), ints(a), None, 0, 1)


@case("n", "c")
def nll_backward_mean(d: Dim) -> fx.Node:
    a, c = d(), d()
    args = (T(), T(a, c), ints(a), None, 1, 0, T())
    return single(aten.nll_loss_backward.default, *args)


@case("n", "c")
def nll_backward_weighted(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten.nll_loss_backward.default, T(), T(a, c), ints(a), T(c), 1, -100, T())


@case("n", "c")
def nll_backward_none(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten.nll_loss_backward.default, T(a), T(a, c), ints(a), None, 0, 1, T())


@case("d0", "d1")
def mse_none(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.mse_loss.default, T(a, b), T(a, b), 0)


@case("d0", "d1")
def mse_mean(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.mse_loss.default, T(a, b), T(a, b), 1)


@case("d0", "d1")
def smooth_l1_sum(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.smooth_l1_loss.default, T(a, b), T(a, b), 2, 0.5)


@case("d0", "d1")
def mse_backward_mean(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.mse_loss_backward.default, T(), T(a, b), T(a, b), 1)


@case("d0", "d1")
def huber_backward_none(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.huber_loss_backward.default, T(a, b), T(a, b), T(a, b), 0, 1.5)


@case("d0")
def weight_norm(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten._weight_norm_interface.default, T(a, b, 3), T(a, 1, 1), 0)


@case("d2")
def weight_norm_backward(d: Dim) -> fx.Node:
    a, c = d(), d()
    return single(aten._weight_norm_interface_backward.default, T(a, 3, c), T(a, 3, c), T(1, 1, c), T(1, 1, c), 2)


@case("k", "n", "e")
def experts(d: Dim) -> fx.Node:
    e, k, n = d(), d(), d()
    return single(torch.ops.autoplan.grouped_mm.default, T(24, k), T(e, k, n), T(e, dtype=torch.int32))


@case("k", "n", "e")
def experts_gradient(d: Dim) -> fx.Node:
    e, k, n = d(), d(), d()
    return single(torch.ops.autoplan.grouped_mm.default, T(k, 24), T(24, n), T(e, dtype=torch.int32))


@case("d0", "d1")
def softplus_backward(d: Dim) -> fx.Node:
    a, b = d(), d()
    return single(aten.softplus_backward.default, T(a, b), T(a, b), 1.0, 20.0)


# -- creation


@case("d0", "d1")
def full(d: Dim) -> fx.Node:
    return single(aten.full.default, [d(), d()], 3.0)


@case("d0")
def new_zeros(d: Dim) -> fx.Node:
    return single(aten.new_zeros.default, T(4, 3), [d(), 2])


@case("d0")
def empty_like(d: Dim) -> fx.Node:
    return single(aten.empty_like.default, T(d(), 2))


@case("d0")
def ones_like(d: Dim) -> fx.Node:
    return single(aten.ones_like.default, T(d()))


@case()
def new_empty_strided(d: Dim) -> fx.Node:
    return single(aten.new_empty_strided.default, T(2), [d(), 2], [2, 1])


@case()
def arange(d: Dim) -> fx.Node:
    return single(aten.arange.default, d())


# -- attention


def attention_args(d: Dim, mask: str, causal: bool, e: int = 4) -> tuple[object, ...]:
    b, g, r, s, t = d(), d(), d(), d(), d()
    masks = {"none": None, "bool": bools(b, 1, s, t), "heads": T(1, g * r, s, t), "row": T(b, 1, 1, t)}
    return (T(b, g * r, s, 4), T(b, g, t, 4), T(b, g, t, e), masks[mask], causal, 0.5)


@case("b", "g", "s")
def attention(d: Dim) -> fx.Node:
    return single(torch.ops.autoplan.attention.default, *attention_args(d, "none", False))


@case("b", "g", "s")
def attention_causal(d: Dim) -> fx.Node:
    return single(torch.ops.autoplan.attention.default, *attention_args(d, "none", True))


@case("b", "g", "s")
def attention_causal_masked(d: Dim) -> fx.Node:
    return single(torch.ops.autoplan.attention.default, *attention_args(d, "row", True, e=3))


@case("b", "g", "s")
def attention_masked(d: Dim) -> fx.Node:
    return single(torch.ops.autoplan.attention.default, *attention_args(d, "heads", False))


@case("b", "g", "s")
def attention_backward(d: Dim) -> fx.Node:
    return _attention_backward(d, "none", False)


@case("b", "g", "s")
def attention_backward_causal(d: Dim) -> fx.Node:
    return _attention_backward(d, "none", True)


@case("b", "g", "s")
def attention_backward_masked(d: Dim) -> fx.Node:
    return _attention_backward(d, "heads", False)


def _attention_backward(d: Dim, mask: str, causal: bool) -> fx.Node:
    q, k, v, bias, *rest = attention_args(d, mask, causal)
    out, lse = T(*q.shape), T(*q.shape[:3])
    return single(torch.ops.autoplan.attention_backward.default, T(*q.shape), q, k, v, out, lse, bias, *rest)


# -- the tests


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_every_choice_recombines(name: str, data: st.DataObject) -> None:
    """Sizes that no degree divides are drawn as well as multiples, so that unsharded dims are odd."""
    degree = data.draw(st.sampled_from([2, 3, 4]), label="degree")
    size = st.one_of(st.integers(1, 2).map(lambda n: n * degree), st.integers(1, 5))
    build, _ = CASES[name]
    node = build(lambda: data.draw(size))
    assert has_rule(node) or name == "arange"
    for choice in refine(node.graph.nodes).choices(node, SIZES, degree):
        verify_choice(node, choice, SIZES, degree, seed=degree)


@pytest.mark.parametrize("name", CASES)
def test_expected_letters_can_be_sharded(name: str) -> None:
    """The test above holds for a rule that allows nothing; this one asks for what each rule is there to allow."""
    build, letters = CASES[name]
    node = build(lambda: 4)
    choices = refine(node.graph.nodes).choices(node, SIZES, 2)
    sharded = {c.name.partition(".")[0] for c in choices if c.sharded}
    assert set(letters) <= sharded
    if not letters:
        assert not sharded


@pytest.mark.parametrize(
    ("shapes", "letters"), [(((24, 16), (3, 16, 32)), {"k", "n"}), (((16, 24), (24, 32)), {"m", "n"})]
)
def test_grouped_products(shapes: tuple[tuple[int, ...], ...], letters: set[str]) -> None:
    """They run in bfloat16 only, so sums are compared to its precision."""
    a, b = (T(*shape, dtype=torch.bfloat16) for shape in shapes)
    node = single(aten._grouped_mm.default, a, b, T(3, dtype=torch.int32))
    choices = refine(node.graph.nodes).choices(node, SIZES, 2)
    assert {c.name for c in choices} == {"*"} | letters
    for choice in choices:
        verify_choice(node, choice, SIZES, 2, dtype=torch.bfloat16, tolerance=0.1)


def test_linear_ops_pass_partials_through() -> None:
    """In a chain after a product with its contracted dim sharded, each op listed takes a Partial."""
    graph = fx.Graph()
    build, _ = CASES["mm"]
    for target, linear in [
        (lambda x: (aten.neg.default, (x,)), True),
        (lambda x: (aten.mul.Scalar, (x, 2.0)), True),
        (lambda x: (aten.add.Tensor, (x, x)), True),
        (lambda x: (aten.add.Tensor, (x, 1.0)), False),
        (lambda x: (aten.mul.Tensor, (x, x)), False),  # linear in each place, but the node reads one value
        (lambda x: (aten.exp.default, (x,)), False),
    ]:
        node = build(lambda: 4)
        graph = node.graph
        op, args = target(node)
        user = graph.call_function(op, args)
        user.meta["specs"] = node.meta["specs"]
        names = {c.name for c in refine(graph.nodes).choices(user, SIZES, 2)}
        assert any(n.startswith("+") for n in names) == linear, (op, names)
        for choice in refine(graph.nodes).choices(user, SIZES, 2):
            verify_choice(user, choice, SIZES, 2)
