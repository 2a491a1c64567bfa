"""Quantised GroupedMatmul: values of int8 products, shapes and dtypes of all, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_graph
from moe_graph import ops
from moe_graph.config import Soc
from moe_graph.ops import OpError, TensorSpec, find
from tests.ops.comparing import kernel_and_reference

M, K, N, G = 7, 64, 16, 3
SIZES = [2, 0, 4]
I8, F16, BF16, F32 = torch.int8, torch.float16, torch.bfloat16, torch.float32
I4, FP8 = torch.int4, torch.float8_e4m3fn  # type: ignore[attr-defined]
ROWS = {"split_item": 3, "group_type": 0}


def _int8(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=I8)


def _float(*shape: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype) * 1e-3


def _inputs(**given: Any) -> list[Any]:
    """Return the IR inputs; lists hold one tensor."""
    names = ("x", "weight", "bias", "scale", "offset", "antiquant_scale", "antiquant_offset")
    lists = [[given[name]] if name in given else [] for name in names]
    return [*lists, given.get("group_list"), given.get("per_token_scale")]


def _spec(*shape: int, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(shape, dtype)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("dtype", "y", "scale", "bias"),
    [
        (0, F16, F32, torch.int32),
        (0, F16, F32, None),
        (1, BF16, BF16, torch.int32),
        (1, BF16, BF16, BF16),
        (1, BF16, F32, BF16),
    ],
)
def test_int8_products_are_dequantised_products_of_float64(
    dtype: int,
    y: torch.dtype,
    scale: torch.dtype,
    bias: torch.dtype | None,
    per_token: bool,
    transposed: bool,
    kind: int,
) -> None:
    x, weight = _int8(M, K, seed=1), _int8(G, K, N, seed=2)
    given: dict[str, Any] = {"scale": _float(G, N, seed=3, dtype=scale)}
    exact = torch.zeros(sum(SIZES), N, dtype=torch.float64)
    rows_scale = _float(M, seed=4) if per_token else None
    if bias is not None:
        given["bias"] = (_float(G, N, seed=5) * 1e6).to(bias)
    begin = 0
    for group, size in enumerate(SIZES):
        rows = slice(begin, begin + size)
        begin += size
        product = x[rows].double() @ weight[group].double()
        if bias is torch.int32:
            product += given["bias"][group].double()
        product *= given["scale"][group].double()
        if rows_scale is not None:
            product *= rows_scale[rows, None].double()
        if bias is BF16:
            product += given["bias"][group].double()
        exact[rows] = product
    counts = torch.tensor(SIZES)
    inputs = _inputs(
        x=x,
        weight=weight.mT.contiguous() if transposed else weight,
        group_list=counts if kind else counts.cumsum(0),
        per_token_scale=rows_scale,
        **given,
    )
    attrs = {**ROWS, "dtype": dtype, "group_list_type": kind, "transpose_weight": transposed}
    got, reference = kernel_and_reference("GroupedMatmul", inputs, attrs)
    assert got[0] is not None
    assert got[0].dtype is y
    assert torch.equal(got[0][: sum(SIZES)], reference[0][: sum(SIZES)])
    ulp = {F16: 2**-10, BF16: 2**-7}[y]
    torch.testing.assert_close(got[0][: sum(SIZES)].double(), exact, rtol=ulp, atol=1e-6)
    assert torch.isnan(got[0][sum(SIZES) :]).all()


def test_int32_y_is_the_exact_sum_and_needs_no_scale() -> None:
    x, weight = torch.full((2, 512), -128, dtype=I8), torch.full((1, 512, 8), -128, dtype=I8)
    bias = torch.arange(8, dtype=torch.int32)[None]
    inputs = _inputs(x=x, weight=weight, bias=bias, group_list=torch.tensor([2]))
    got, _ = kernel_and_reference("GroupedMatmul", inputs, {**ROWS, "dtype": 2})
    assert torch.equal(got[0], (128 * 128 * 512 + bias).expand(2, 8))


def test_a_list_of_index_and_size_names_the_weight_of_each_group() -> None:
    x, weight = _int8(M, K, seed=1), _int8(G, K, N, seed=2)
    scale = torch.ones(G, N)
    listed = torch.tensor([[0, 2], [2, 4], [1, 0]])
    sparse = _inputs(x=x, weight=weight, scale=scale, group_list=listed)
    plain = _inputs(x=x, weight=weight, scale=scale, group_list=torch.tensor(SIZES))
    got, _ = kernel_and_reference("GroupedMatmul", sparse, {**ROWS, "group_list_type": 2})
    want, _ = kernel_and_reference("GroupedMatmul", plain, {**ROWS, "group_list_type": 1})
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)


def test_the_list_form_of_the_torch_op_takes_int8() -> None:
    x, weight = _int8(2, K, seed=1), _int8(1, K, N, seed=2)
    (y,) = torch.ops.moe_graph.grouped_matmul(
        [x],
        [weight],
        [],
        [torch.full((1, N), 2.0**-10)],
        [],
        [],
        [],
        torch.tensor([2]),
        torch.tensor([1.0, 0.5]),
        **ROWS,
    )
    want = (x.double() @ weight[0].double()) * 2.0**-10 * torch.tensor([[1.0], [0.5]])
    torch.testing.assert_close(y, want.half(), rtol=0, atol=0)


def test_the_public_function_takes_int8() -> None:
    x, weight = _int8(3, K, seed=1), _int8(2, K, N, seed=2)
    group_list = torch.tensor([1, 3])
    exact = torch.cat([x[:1].double() @ weight[0].double(), x[1:].double() @ weight[1].double()])
    y = ops.grouped_matmul(x, weight, group_list=group_list, output_dtype=torch.int32)
    assert torch.equal(y, exact.int())
    scale = torch.full((2, N), 2.0**-12, dtype=BF16)
    y = ops.grouped_matmul(x, weight, group_list=group_list, scale=scale, output_dtype=BF16)
    assert torch.equal(y, (exact * 2.0**-12).to(BF16))
    with pytest.raises(OpError, match="dtype"):
        ops.grouped_matmul(x, weight, group_list=group_list, output_dtype=torch.float64)
    with pytest.raises(OpError, match="scale"):
        ops.grouped_matmul(x, weight, group_list=group_list)
    with pytest.raises(OpError, match="that of x"):
        ops.grouped_matmul(x.half(), weight.half(), group_list=group_list, output_dtype=BF16)


SCALES = {"scale": _spec(G, N, dtype=F32)}
A8W8 = {
    "x": _spec(M, K, dtype=I8),
    "weight": _spec(G, K, N, dtype=I8),
    "group_list": _spec(G, dtype=torch.int64),
}
A16W4 = {
    "x": _spec(M, K, dtype=F16),
    "weight": _spec(G, K, N, dtype=I4),
    "group_list": _spec(G, dtype=torch.int64),
}


@pytest.mark.parametrize("soc", list(Soc))
@pytest.mark.parametrize(
    ("given", "attrs", "argument"),
    [
        ({**A8W8}, {}, "scale"),
        ({**A8W8, "scale": _spec(G, N - 1, dtype=F32)}, {}, "scale"),
        ({**A8W8, **SCALES, "per_token_scale": _spec(M - 1, dtype=F32)}, {}, "per_token_scale"),
        ({**A8W8, **SCALES, "per_token_scale": _spec(M, dtype=BF16)}, {}, "per_token_scale"),
        ({**A8W8, **SCALES, "offset": _spec(G, N, dtype=F32)}, {}, "offset"),
        ({**A8W8, **SCALES, "antiquant_scale": _spec(G, N, dtype=F16)}, {}, "antiquant_scale"),
        ({**A8W8, "scale": _spec(G, N, dtype=F16)}, {}, "scale"),
        ({**A8W8, "scale": _spec(G, N, dtype=BF16)}, {"dtype": 0}, "dtype"),
        ({**A8W8, **SCALES}, {"dtype": 7}, "dtype"),
        ({**A8W8, **SCALES}, {"act_type": 3}, "act_type"),
        ({**A8W8, **SCALES, "bias": _spec(G, N + 1, dtype=torch.int32)}, {}, "bias"),
        ({**A8W8, **SCALES, "weight": _spec(G, K, N, dtype=FP8)}, {}, "weight"),
        ({**A16W4}, {}, "antiquant_scale"),
        ({**A16W4, "antiquant_scale": _spec(G, 3, N, dtype=F16)}, {}, "antiquant_scale"),
        ({**A16W4, "antiquant_scale": _spec(G, N, dtype=BF16)}, {}, "antiquant_scale"),
        ({**A16W4, "antiquant_scale": _spec(G, N, dtype=F16), **SCALES}, {}, "scale"),
    ],
)
def test_bad_quantisation_is_named(
    given: dict[str, Any], attrs: dict[str, Any], argument: str, soc: Soc
) -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    with pytest.raises(OpError) as caught:
        opdef.infer(_inputs(**given), opdef.bind_attrs({**ROWS, **attrs}), soc)
    assert caught.value.argument == argument


@pytest.mark.parametrize("soc", [Soc.A2, Soc.ASCEND950])
def test_shapes_and_dtypes_of_weights_in_groups(soc: Soc) -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    inputs = _inputs(**A16W4, antiquant_scale=_spec(G, 2, N, dtype=F16))
    (y,) = opdef.infer(inputs, opdef.bind_attrs(ROWS), soc)
    assert y == TensorSpec((M, N), F16)


def test_shapes_of_float8_on_950_by_block_and_by_mx() -> None:
    def infer(scale: tuple[int, ...], per_token: tuple[int, ...], dtype: str) -> Any:
        return moe_graph.infer_shape(
            "GroupedMatmul",
            [
                [((M, 200), "float8_e4m3fn")],
                [((G, 200, 300), "float8_e5m2")],
                [],
                [(scale, dtype)],
                [],
                [],
                [],
                ((G,), "int64"),
                (per_token, dtype),
            ],
            {**ROWS, "dtype": 3},
            "950",
        )

    assert infer((G, 2, 3), (M, 2), "float32") == [(M, 300)]
    assert infer((G, 4, 300, 2), (M, 4, 2), "float8_e8m0fnu") == [(M, 300)]
    with pytest.raises(OpError):
        infer((G, 2, 3), (M, 3), "float32")


E8M0, FP4 = torch.float8_e8m0fnu, torch.float4_e2m1fn_x2


def _mx(inner: int, columns: int, dtype: torch.dtype) -> list[Any]:
    blocks = -(-inner // 64)
    return _inputs(
        x=_spec(M, inner, dtype=dtype),
        weight=_spec(G, inner, columns, dtype=dtype),
        scale=_spec(G, blocks, columns, 2, dtype=E8M0),
        group_list=_spec(G, dtype=torch.int64),
        per_token_scale=_spec(M, blocks, 2, dtype=E8M0),
    )


@pytest.mark.parametrize(
    ("inner", "columns", "argument"),
    [(200, 16, ""), (201, 16, "x"), (2, 16, "x"), (64, 15, "weight")],
)
def test_mx_float4_comes_in_pairs(inner: int, columns: int, argument: str) -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    attrs = opdef.bind_attrs(ROWS)
    assert opdef.infer(_mx(inner, columns, FP8), attrs, Soc.ASCEND950)[0].shape == (M, columns)
    if not argument:
        opdef.infer(_mx(inner, columns, FP4), attrs, Soc.ASCEND950)
        return
    with pytest.raises(OpError) as caught:
        opdef.infer(_mx(inner, columns, FP4), attrs, Soc.ASCEND950)
    assert caught.value.argument == argument


def test_mx_scales_are_checked_when_the_op_runs() -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    inputs = _mx(200, 16, FP8)
    inputs[3] = [_spec(G, 3, 16, 2, dtype=E8M0)]
    attrs = opdef.bind_attrs(ROWS)
    opdef.infer_shape(inputs, attrs, Soc.ASCEND950)
    with pytest.raises(OpError, match="scale: got dim 1 3, want 4"):
        opdef.infer(inputs, attrs, Soc.ASCEND950)


@pytest.mark.parametrize(
    ("inner", "groups", "argument"), [(512, 2, ""), (512, 4, "scale"), (18688, 73, "x")]
)
def test_int8_by_int4_has_scales_of_256_rows(inner: int, groups: int, argument: str) -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    inputs = _inputs(
        x=_spec(M, inner, dtype=I8),
        weight=_spec(G, inner, N, dtype=I4),
        bias=_spec(G, N, dtype=F32),
        scale=_spec(G, groups, N, dtype=torch.uint64),
        group_list=_spec(G, dtype=torch.int64),
        per_token_scale=_spec(M, dtype=F32),
    )
    attrs = opdef.bind_attrs({**ROWS, "dtype": 1})
    if not argument:
        assert opdef.infer(inputs, attrs, Soc.A3) == [TensorSpec((M, N), BF16)]
        return
    with pytest.raises(OpError) as caught:
        opdef.infer(inputs, attrs, Soc.A3)
    assert caught.value.argument == argument


def test_unknown_sizes_pass() -> None:
    inputs = [
        [((-1, -1), "int8")],
        [((G, K, N), "int8")],
        [],
        [((G, N), "float32")],
        [],
        [],
        [],
        ((G,), "int64"),
        ((-1,), "float32"),
    ]
    for soc in Soc:
        assert moe_graph.infer_shape("GroupedMatmul", inputs, ROWS, soc) == [(-1, N)]


@pytest.mark.parametrize(
    ("given", "attrs", "argument"),
    [
        ({"x": (F16, M, K), "weight": (I8, G, K, N)}, {}, "x"),
        ({"x": (I8, M, K), "weight": (I8, G, K, N), "scale": (torch.int64, G, N)}, {}, "scale"),
        ({"x": (I8, M, K), "weight": (I8, G, K, N), "scale": (F32, G, N)}, {"act_type": 1}, ""),
    ],
)
def test_products_without_documented_rounding_are_refused_by_name(
    given: dict[str, Any], attrs: dict[str, Any], argument: str
) -> None:
    opdef = find("GroupedMatmul")
    assert opdef is not None
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, *shape) in given.items()}
    inputs = _inputs(**tensors, group_list=torch.tensor([1, 2, 3]))
    for compute in (opdef.kernel, opdef.reference):
        with pytest.raises(OpError) as caught:
            compute(inputs, opdef.bind_attrs({**ROWS, **attrs}))
        assert caught.value.argument == (argument or "act_type")
