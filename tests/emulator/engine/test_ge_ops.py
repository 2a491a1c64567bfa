"""GE ops that no converter of plain TorchAir emits: the node itself against PyTorch.

Our own converters, and those of other people, may emit them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ge_graphs import ge, run_ge
from through_torchair import TOLERANCE, assert_same
from torch import Tensor
from torchair.ge import DataType

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
P = X.abs() + 0.1
IDS = torch.tensor([2, 0, 2, 1])
ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
HEADS = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(4))
COS, SIN = HEADS[:1, :, :1].cos(), HEADS[:1, :, :1].sin()
I32 = torch.arange(-6, 9, dtype=torch.int32).reshape(3, 5)
IN_BOX = torch.randint(0, 3, (4, 2), generator=torch.Generator().manual_seed(5))

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]


def int32(value: Any) -> Any:
    return ge.Const(value, DataType.DT_INT32)


def gradient(function: Callable[..., Tensor], *wanted: int) -> Callable[..., list[Tensor]]:
    """Return a function (dy, *inputs) -> gradients of the inputs numbered `wanted`."""

    def run(dy: Tensor, *inputs: Tensor) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        function(*leaves).backward(dy)
        return [leaves[i].grad for i in wanted]  # type: ignore[misc]

    return run


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def put(x: Tensor, value: Tensor, ids: Tensor, accumulate: bool) -> Tensor:
    return x.clone().index_put((ids,), value, accumulate)


CASES: dict[str, Case] = {
    # elementwise
    "Atan2": (ge.Atan2, torch.atan2, (X, Y)),
    "BitwiseXor": (ge.BitwiseXor, torch.bitwise_xor, (I32, I32.abs())),
    "DivNoNan": (ge.DivNoNan, lambda x, y: torch.where(y == 0, 0.0, x / y), (X, Y.round())),
    "Erfc": (ge.Erfc, torch.erfc, (X,)),
    "Exp with base 2": (
        lambda x: ge.Exp(x, base=2.0, scale=3.0, shift=1.0), lambda x: 2 ** (3 * x + 1), (X,)),
    "IsFinite": (ge.IsFinite, torch.isfinite, (X / 0,)),
    "IsNan": (ge.IsNan, torch.isnan, (X.round() / 0,)),
    "LeftShift": (ge.LeftShift, torch.bitwise_left_shift, (I32, torch.full_like(I32, 2))),
    "Log with base 3": (
        lambda x: ge.Log(x, base=3.0, scale=2.0, shift=1.0),
        lambda x: torch.log(2 * x + 1) / torch.log(torch.tensor(3.0)), (P,)),
    "Mod": (ge.Mod, torch.fmod, (X, P)),
    "SquaredDifference": (ge.SquaredDifference, lambda x, y: (x - y) ** 2, (X, Y)),
    "TruncateDiv": (
        ge.TruncateDiv, lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        (I32, torch.full_like(I32, 4))),
    "Trunc": (ge.Trunc, torch.trunc, (X * 3,)),
    "Xlogy": (ge.Xlogy, torch.xlogy, (X, P)),
    # reductions
    "Cumprod": (lambda x: ge.Cumprod(x, 1), lambda x: x.cumprod(1), (X,)),
    "Cumsum exclusive": (
        lambda x: ge.Cumsum(x, 1, exclusive=True), lambda x: x.cumsum(1) - x, (X,)),
    "Cumsum reverse": (
        lambda x: ge.Cumsum(x, 0, reverse=True), lambda x: x.flip(0).cumsum(0).flip(0), (X,)),
    "ReduceMin": (lambda x: ge.ReduceMin(x, [0, 1]), torch.amin, (X,)),
    "ReduceProd": (lambda x: ge.ReduceProd(x, [0, 1]), torch.prod, (X,)),
    "ReduceStdV2": (
        lambda x: ge.ReduceStdV2(x, dim=[1], correction=0),
        lambda x: [x.std(1, correction=0), x.mean(1)], (X,)),
    # shape
    "Eye": (lambda: ge.Eye(num_rows=3, num_columns=4), lambda: torch.eye(3, 4), ()),
    "OneHot": (
        lambda x: ge.OneHot(x, 4, 1.0, 0.0),
        lambda x: F.one_hot(x, 4).float(), (IDS,)),
    "OneHot in front": (
        lambda x: ge.OneHot(x, 4, 1.0, 0.0, axis=0),
        lambda x: F.one_hot(x, 4).float().t(), (IDS,)),
    "Permute": (lambda x: ge.Permute(x, order=[1, 0]), torch.t, (X,)),
    "Slice": (lambda x: ge.Slice(x, [1, 0], [2, -1]), lambda x: x[1:], (X,)),
    "Split": (lambda x: ge.Split(int32(0), x, num_split=3), lambda x: x.chunk(3, 0), (X,)),
    "Size": (lambda x: ge.Size(x), lambda x: torch.tensor(15, dtype=torch.int32), (X,)),
    # index
    "Bincount": (
        ge.Bincount, lambda x, size, w: torch.bincount(x, minlength=5).float(),
        (IDS.int(), torch.tensor(5, dtype=torch.int32), torch.tensor([]))),
    "GatherNd": (ge.GatherNd, lambda x, i: x[i[:, 0], i[:, 1]], (X, IN_BOX)),
    "Histogram": (
        lambda x: ge.Histogram(x, bins=4, min=-2.0, max=2.0),
        lambda x: torch.histc(x, 4, -2, 2).int(), (X,)),
    "IndexPutV2": (
        lambda x, v, i: ge.IndexPutV2(ge.TensorMove(x), v, [1, 0], [1, 0], [i]),
        lambda x, v, i: put(x, v, i, False), (X, ROWS[:3], torch.tensor([2, 0, 1]))),
    "IndexPutV2 adding": (
        lambda x, v, i: ge.IndexPutV2(ge.TensorMove(x), v, [1, 0], [1, 0], [i], accumulate=True),
        lambda x, v, i: put(x, v, i, True), (X, ROWS, IDS)),
    "MaskedScatter": (ge.MaskedScatter, torch.masked_scatter, (X, X > 0, Y)),
    "MaskedSelectV2": (ge.MaskedSelectV2, torch.masked_select, (X, X > 0)),
    "NonZero": (ge.NonZero, torch.nonzero, (X > 0,)),
    "ScatterAdd": (
        lambda x, i, s: ge.ScatterAdd(ge.TensorMove(x), i, s),
        lambda x, i, s: x.index_add(0, i, s), (X, IDS, ROWS)),
    "ScatterNdAdd": (
        lambda x, i, s: ge.ScatterNdAdd(ge.TensorMove(x), i, s),
        lambda x, i, s: x.index_put(tuple(i.unbind(-1)), s, accumulate=True),
        (X, IN_BOX, ROWS[:, 0])),
    "ScatterUpdate": (
        lambda x, i, s: ge.ScatterUpdate(ge.TensorMove(x), i, s),
        lambda x, i, s: x.index_copy(0, i, s), (X, torch.tensor([2, 0]), ROWS[:2])),
    "TensorScatterAdd": (
        ge.TensorScatterAdd,
        lambda x, i, s: x.index_put(tuple(i.unbind(-1)), s, accumulate=True),
        (X, IN_BOX, ROWS[:, 0])),
    "TensorScatterUpdate": (
        ge.TensorScatterUpdate, lambda x, i, s: x.index_copy(0, i[:, 0], s),
        (X, torch.tensor([[2], [0]]), ROWS[:2])),
    "UnsortedSegmentSum": (
        lambda x, i: ge.UnsortedSegmentSum(x, i, 3),
        lambda x, i: torch.zeros(3, 5).index_add(0, i, x), (ROWS, IDS)),
    # activations and losses
    "FastGelu": (ge.FastGelu, lambda x: x * torch.sigmoid(1.702 * x), (X,)),
    "FastGeluGrad": (ge.FastGeluGrad, gradient(lambda x: x * torch.sigmoid(1.702 * x), 0), (Y, X)),
    "GeluGradV2": (ge.GeluGradV2, gradient(F.gelu, 0), (Y, X)),
    "GeluV2": (ge.GeluV2, F.gelu, (X,)),
    "LogSoftmaxGrad": (
        lambda dy, x: ge.LogSoftmaxGrad(dy, ge.LogSoftmaxV2(x)),
        gradient(lambda x: x.log_softmax(-1), 0), (Y, X)),
    "Softplus": (ge.Softplus, F.softplus, (X,)),
    "SoftplusV2": (lambda x: ge.SoftplusV2(x, beta=2.0), lambda x: F.softplus(x, 2.0), (X,)),
    "SoftplusV2Grad": (
        lambda dy, x: ge.SoftplusV2Grad(dy, x, beta=2.0),
        gradient(lambda x: F.softplus(x, 2.0), 0), (Y, X)),
    "Swish with scale": (
        lambda x: ge.Swish(x, scale=1.5), lambda x: x * torch.sigmoid(1.5 * x), (X,)),
    "SwishGrad": (
        lambda dy, x: ge.SwishGrad(dy, x, ge.Swish(x)), gradient(F.silu, 0), (Y, X)),
    "SwishGrad with scale": (
        lambda dy, x: ge.SwishGrad(dy, x, ge.Swish(x, scale=1.5), scale=1.5),
        gradient(lambda x: x * torch.sigmoid(1.5 * x), 0), (Y, X)),
    "BinaryCrossEntropy": (
        lambda x, y: ge.BinaryCrossEntropy(x, y, None), F.binary_cross_entropy,
        (X.sigmoid(), Y.sigmoid())),
    "SigmoidCrossEntropyWithLogitsV2": (
        lambda x, y: ge.SigmoidCrossEntropyWithLogitsV2(x, y, None, None),
        F.binary_cross_entropy_with_logits, (X, Y.sigmoid())),
    "KLDiv": (
        lambda x, y: ge.KLDiv(x, y, reduction="sum"),
        lambda x, y: F.kl_div(x, y, reduction="sum"), (X.log_softmax(-1), Y.softmax(-1))),
    "SmoothL1LossV2": (
        lambda x, y: ge.SmoothL1LossV2(x, y, sigma=0.5),
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), (X, Y)),
    # norms and position embeddings
    "RmsNorm": (lambda x, g: ge.RmsNorm(x, g)[0], rms_norm, (X, Y[0])),
    "RmsNormGrad": (
        lambda dy, x, g: ge.RmsNormGrad(dy, x, ge.RmsNorm(x, g)[1], g),
        gradient(rms_norm, 0, 1), (Y, X, Y[0])),
    "AddRmsNorm": (
        lambda x, y, g: [ge.AddRmsNorm(x, y, g)[i] for i in (0, 2)],
        lambda x, y, g: [rms_norm(x + y, g), x + y], (X, Y, Y[0])),
    "RotaryMul": (ge.RotaryMul, rotate, (HEADS, COS, SIN)),
    "RotaryMulGrad": (
        lambda dy, x, cos, sin: ge.RotaryMulGrad(x, cos, sin, dy),
        gradient(rotate, 0, 1, 2), (HEADS.flip(0), HEADS, COS, SIN)),
    "RotaryPositionEmbedding": (
        lambda x, cos, sin: ge.RotaryPositionEmbedding(x, cos, sin, mode=1),
        rotate_pairs, (HEADS, COS, SIN)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ge_op(name: str) -> None:
    build, oracle, inputs = CASES[name]
    inputs = tuple(each.clone() for each in inputs)
    assert_same(run_ge(build, *inputs), oracle(*inputs), (1e-5, 1e-5))


HALF_CASES = [
    name
    for name, (_, _, inputs) in CASES.items()
    if inputs
    and all(each.dtype is torch.float32 for each in inputs)
    and name not in ("Xlogy", "Cumprod", "ReduceProd", "BinaryCrossEntropy", "IsNan", "DivNoNan",
                     "RmsNormGrad", "Mod")
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALF_CASES)
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """The result is the fp32 result of the same (rounded) inputs, rounded at the end."""
    build, oracle, inputs = CASES[name]
    halves = [each.to(dtype) for each in inputs]
    try:
        got = run_ge(build, *halves)
    except RuntimeError as error:
        if "want one of" in str(error):
            pytest.skip("the prototype of the op does not list this dtype")
        raise
    want = torch.utils._pytree.tree_leaves(oracle(*(each.float() for each in halves)))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b.to(a.dtype), TOLERANCE[dtype])


def test_dropout() -> None:
    x = torch.ones(1000)

    def build(x: Any) -> list[Any]:
        mask = ge.StatelessDropOutGenMask([1000], 0.75, 3, 0, [0, 5])
        return [ge.DropOutDoMask(x, mask, 0.75), mask]

    y, mask = run_ge(build, x)
    assert mask.shape == (128,), "bits are padded to a multiple of 128"
    kept = y != 0
    assert 0.7 < kept.float().mean() < 0.8
    assert_same(y[kept], torch.full_like(y[kept], 1 / 0.75))
    assert_same(run_ge(build, x)[0], y)


def test_empty_is_poisoned() -> None:
    floats, ints, zero = run_ge(
        lambda: [
            ge.Empty(int32([3]), dtype=DataType.DT_FLOAT),
            ge.Empty(int32([3]), dtype=DataType.DT_INT64),
            ge.Empty(int32([3]), dtype=DataType.DT_FLOAT, init=True),
        ]
    )
    assert floats.isnan().all()
    assert (ints == ints[0]).all()
    assert ints[0] < -(10**9)
    assert (zero == 0).all()


def test_a_tensor_at_an_address() -> None:
    parameter = torch.randn(2, 3)

    def build(x: Any) -> list[Any]:
        there = ge.ConstPlaceHolder(
            origin_shape=[2, 3], origin_format=2, storage_shape=[2, 3], storage_format=2,
            expand_dim_rules="", dtype=DataType.DT_FLOAT, addr=parameter.data_ptr(),
            size=parameter.nbytes,
        )  # fmt: skip
        return [ge.Add(x, there), there]

    total, copy = run_ge(build, torch.ones(2, 3))
    assert_same([total, copy], [parameter + 1, parameter])
    assert copy.data_ptr() != parameter.data_ptr()


THREADED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "sums": (
        lambda x: [ge.ReduceSum(x, [0, 1]), ge.ReduceMean(x, [0, 1]), ge.ReduceSum(x, [0]),
                   ge.ReduceSum(x, [1]), ge.Cumsum(x, 0)],
        (torch.randn(701, 503),)),
    "softmaxes": (
        lambda x: [ge.SoftmaxV2(x, axes=[0]), ge.SoftmaxV2(x), ge.LogSoftmaxV2(x, axes=[0])],
        (torch.randn(701, 503),)),
    "layer norm": (
        lambda dy, x, gamma, rstd, mean: ge.LayerNormGradV3(dy, x, rstd, mean, gamma),
        (torch.randn(701, 503), torch.randn(701, 503), torch.randn(503), torch.rand(701, 1),
         torch.randn(701, 1))),
    "scatters": (
        lambda x, ids, rows: [
            ge.ScatterAdd(ge.TensorMove(x), ids, rows), ge.UnsortedSegmentSum(rows, ids, 100),
            ge.IndexPutV2(ge.TensorMove(x), rows, [1, 0], [1, 0], [ids], accumulate=True),
            ge.EmbeddingDenseGrad(rows, ids, num_weights=100)],
        (torch.randn(100, 64), torch.randint(0, 100, (5000,)), torch.randn(5000, 64))),
}  # fmt: skip


@pytest.mark.parametrize("name", THREADED)
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    build, inputs = THREADED[name]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run_ge(build, *inputs))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_sum(dtype: torch.dtype) -> None:
    x = torch.randn(211, 331).to(dtype)
    total, mean = run_ge(lambda x: [ge.ReduceSum(x, [0, 1]), ge.ReduceMean(x, [-1, -2])], x)
    assert_same([total, mean], [x.double().sum().to(dtype), x.double().mean().to(dtype)])
