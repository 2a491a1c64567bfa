"""Operators on the emulated device against the same operators on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from moe_graph.emulator import eager
from moe_graph.emulator.eager_fallback import MissingKernelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)

Function = Callable[[str], Any]


def ints(device: str, *values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def row(device: str, count: int = 6) -> torch.Tensor:
    return torch.arange(float(count), device=device)


def grid(device: str) -> torch.Tensor:
    return row(device).view(2, 3)


CASES: dict[str, Function] = {
    # creation
    "arange": lambda d: torch.arange(2, 9, 3, device=d, dtype=torch.bfloat16),
    "eye": lambda d: torch.eye(2, 3, device=d),
    "full": lambda d: torch.full((2, 2), 7, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "new_zeros": lambda d: grid(d).new_zeros(2),
    "ones_like": lambda d: torch.ones_like(grid(d), dtype=torch.int32),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "zeros": lambda d: torch.zeros(3, dtype=torch.bool, device=d),
    # casts and copies
    "to dtype": lambda d: grid(d).to(torch.bfloat16),
    "to int": lambda d: (grid(d) * 1.7).int(),
    "contiguous": lambda d: grid(d).t().contiguous(),
    "clone": lambda d: grid(d).t().clone(),
    "deepcopy": lambda d: copy.deepcopy(grid(d)),
    "copy_ broadcast": lambda d: torch.zeros(2, 3, device=d).copy_(row(d, 3)),
    "copy_ from cpu": lambda d: torch.zeros(2, 3, device=d).copy_(grid("cpu").t().reshape(2, 3)),
    # views
    "as_strided": lambda d: row(d).as_strided((2, 2), (1, 2), 1),
    "chunk": lambda d: row(d).chunk(3)[1],
    "diagonal": lambda d: torch.diagonal(torch.eye(3, device=d)),
    "expand": lambda d: row(d, 3).expand(2, 3) + 1,
    "movedim": lambda d: torch.zeros(2, 3, 4, device=d).movedim(0, 2),
    "select": lambda d: grid(d)[1],
    "slice": lambda d: row(d)[1:5:2],
    "squeeze_": lambda d: torch.ones(1, 2, device=d).squeeze_(),
    "t_": lambda d: grid(d).t_(),
    "unfold": lambda d: row(d).unfold(0, 3, 2),
    "view dtype": lambda d: torch.ones(2, device=d).view(torch.int32),
    "view_as_real": lambda d: torch.view_as_real(torch.polar(row(d, 2), row(d, 2))),
    # indexing
    "bool index": lambda d: row(d)[row(d) > 3],
    "gather": lambda d: grid(d).gather(1, ints(d, 2, 0).view(2, 1)),
    "index": lambda d: grid(d)[ints(d, 1, 0, 1)],
    "index on cpu": lambda d: row(d)[torch.tensor([1, 3])],
    "index_add": lambda d: torch.zeros(3, 3, device=d).index_add_(0, ints(d, 1, 1), grid(d)),
    "index_copy": lambda d: torch.zeros(3, device=d).index_copy_(0, ints(d, 1), row(d, 1) + 1),
    "index_fill": lambda d: row(d).index_fill_(0, ints(d, 1, 2), 9),
    "index_put": lambda d: torch.zeros(4, device=d).index_put_((ints(d, 0, 2),), row(d, 2) + 1),
    "index_select": lambda d: grid(d).index_select(1, ints(d, 2, 0)),
    "masked_fill": lambda d: row(d).masked_fill(row(d) > 2, -1),
    "masked_scatter": lambda d: row(d, 3).masked_scatter(row(d, 3) > 0, row(d, 2) + 7),
    "masked_select": lambda d: row(d).masked_select(row(d) > 2),
    "nonzero": lambda d: torch.nonzero(ints(d, 3, 0, 1)),
    "put_": lambda d: row(d).put_(ints(d, 2), row(d, 1)),
    "scatter_add": lambda d: torch.zeros(3, device=d).scatter_add_(0, ints(d, 0, 0), row(d, 2)),
    "scatter_reduce": lambda d: row(d, 3).scatter_reduce(0, ints(d, 0, 0), row(d, 2), "amax"),
    "take": lambda d: grid(d).take(ints(d, 4)),
    "where": lambda d: torch.where(row(d) > 2, row(d), 0.0),
    "where index": lambda d: torch.where(row(d) > 2),
    # routing
    "argsort": lambda d: torch.argsort(ints(d, 3, 1, 2, 1), stable=True),
    "bincount": lambda d: torch.bincount(ints(d, 0, 1, 1, 3), minlength=6),
    "cumsum": lambda d: torch.cumsum(ints(d, 1, 2, 3), 0, dtype=torch.int32),
    "histc": lambda d: torch.histc(row(d), 3, 0, 6),
    "one_hot": lambda d: F.one_hot(ints(d, 0, 2, 1), 4),
    "repeat_interleave": lambda d: row(d, 3).repeat_interleave(ints(d, 1, 0, 2)),
    "searchsorted": lambda d: torch.searchsorted(row(d), row(d, 2) + 0.5),
    "sort": lambda d: torch.sort(ints(d, 3, 1, 2), descending=True),
    "topk": lambda d: torch.topk(grid(d), 2),
    "unique": lambda d: torch.unique(ints(d, 3, 1, 1), return_inverse=True, return_counts=True),
    # reductions and statistics
    "amax": lambda d: grid(d).amax(1),
    "any": lambda d: (grid(d) > 4).any(1),
    "count_nonzero": lambda d: torch.count_nonzero(row(d)),
    "max dim": lambda d: grid(d).max(0),
    "max out": lambda d: torch.max(row(d), 5 - row(d), out=torch.empty(0, device=d)),
    "median": lambda d: row(d).median(),
    "nanmean": lambda d: (row(d) / row(d)).nanmean(),
    "quantile": lambda d: torch.quantile(row(d), 0.3),
    "slogdet": lambda d: torch.slogdet(torch.eye(2, device=d) * 2),
    "std": lambda d: grid(d).std(1),
    "sum of bool": lambda d: (row(d) > 2).sum(dtype=torch.int32),
    "vector_norm": lambda d: torch.linalg.vector_norm(row(d)),
    # arithmetic
    "addcmul": lambda d: torch.addcmul(row(d), row(d), row(d), value=0.5),
    "complex": lambda d: torch.view_as_real(torch.polar(row(d), row(d)) * 2),
    "cpu scalar": lambda d: torch.tensor(2.0) * row(d),
    "floor_divide": lambda d: ints(d, 7, -7) // 2,
    "in place": lambda d: row(d).mul_(2).add_(1),
    "lerp": lambda d: torch.lerp(row(d), row(d) + 2, 0.3),
    "nan_to_num": lambda d: torch.nan_to_num(row(d) / row(d)),
    "out grows": lambda d: torch.add(row(d), 1, out=torch.empty(0, device=d)),
    "out strided": lambda d: torch.add(grid(d), 1, out=torch.empty(3, 2, device=d).t()),
    "remainder": lambda d: ints(d, 7, -7) % 4,
    "rsub": lambda d: 1 - row(d),
    # matrices
    "addmm": lambda d: torch.addmm(row(d, 2), grid(d), grid(d).t()),
    "baddbmm": lambda d: torch.baddbmm(grid(d), grid(d)[None], torch.eye(3, device=d)[None]),
    "einsum": lambda d: torch.einsum("ij,kj->ik", grid(d), grid(d)),
    "matmul 1d": lambda d: torch.matmul(row(d, 3), grid(d).t()),
    "matmul batched": lambda d: torch.matmul(grid(d)[None], grid(d).t()),
    # networks
    "adaptive_avg_pool": lambda d: F.adaptive_avg_pool2d(torch.ones(1, 1, 4, 4, device=d), 2),
    "conv1d": lambda d: F.conv1d(grid(d)[None], torch.ones(1, 2, 2, device=d)),
    "conv2d": lambda d: F.conv2d(grid(d)[None, None], torch.ones(1, 1, 2, 2, device=d)),
    "embedding": lambda d: F.embedding(ints(d, 1, 0), grid(d)),
    "group_norm": lambda d: F.group_norm(grid(d)[None, :, None], 2),
    "interpolate": lambda d: F.interpolate(grid(d)[None], scale_factor=2),
    "layer_norm": lambda d: F.layer_norm(grid(d), (3,)),
    "pad": lambda d: F.pad(grid(d), (1, 2)),
    "rms_norm": lambda d: F.rms_norm(grid(d), (3,)),
    "softmax half to float": lambda d: F.softmax(grid(d).half(), -1, dtype=torch.float32),
    # several tensors at a time
    "cat": lambda d: torch.cat([grid(d), grid(d)], 1),
    "foreach add": lambda d: torch._foreach_add([row(d), grid(d)], 1),
    "foreach norm": lambda d: torch._foreach_norm([row(d), grid(d)]),
    "meshgrid": lambda d: torch.meshgrid(row(d, 2), row(d, 3), indexing="ij"),
    "split": lambda d: row(d).split([1, 2, 3]),
    "stack": lambda d: torch.stack([row(d), row(d)], 1),
    "total_norm": lambda d: torch.nn.utils.get_total_norm([row(d), grid(d)]),
    "vmap": lambda d: torch.vmap(lambda x: x.sum())(grid(d)),
    # without any kernel of torch_npu
    "geqrf": lambda d: torch.geqrf(torch.eye(2, device=d)),
    "fft": lambda d: torch.view_as_real(torch.fft.rfft(row(d))),
}


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
        return
    assert got.device.type == "npu"
    assert got.dtype == want.dtype
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu().nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    assert_same(CASES[name]("npu"), CASES[name]("cpu"))


UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.abs, torch.neg, torch.exp, torch.sigmoid, torch.tanh, torch.rsqrt, torch.square,
    F.relu, F.silu, F.gelu, F.softplus, torch.erf, torch.floor, torch.sign, torch.log1p,
]  # fmt: skip
BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.eq, torch.lt, torch.pow,
    torch.fmod, torch.atan2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_elementwise(dtype: torch.dtype, shape: list[int], transposed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(shape).to(dtype), torch.randn(shape[-1:]).to(dtype)
    npu_x, npu_y = x.npu(), y.npu()
    if transposed and x.dim() > 1:
        x, npu_x = x.transpose(0, 1).contiguous().transpose(0, 1), npu_x.transpose(0, 1)
        npu_x = npu_x.contiguous().transpose(0, 1)
    for unary in UNARY:
        assert_same(unary(npu_x), unary(x))
    for binary in BINARY:
        assert_same(binary(npu_x, npu_y), binary(x, y))


@pytest.mark.parametrize("dtype", INTS)
def test_histc_of_integers(dtype: torch.dtype) -> None:
    """The CPU has no such kernel; transformers calls it on a device that is not a CPU."""
    ids = torch.randint(0, 8, (50,), dtype=dtype)
    counts = torch.histc(ids.npu(), bins=8, min=0, max=7)
    assert counts.dtype == dtype
    assert torch.equal(counts.cpu().long(), torch.bincount(ids, minlength=8))


def test_memory_of_empty_tensors_is_poisoned() -> None:
    for dtype in FLOATS:
        assert torch.empty(5, dtype=dtype, device="npu").isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=dtype, device="npu")).isnan().all()
        assert torch.empty_strided((2, 2), (1, 2), dtype=dtype, device="npu").isnan().all()
        assert torch.ones(2, dtype=dtype, device="npu").new_empty(3).isnan().all()
    assert (torch.empty(4, dtype=torch.int32, device="npu") == -1).all()


def test_in_place_operators_return_their_argument() -> None:
    x = torch.ones(3, device="npu")
    assert x.add_(1) is x
    out = torch.empty(3, device="npu")
    assert torch.mul(x, 3, out=out) is out
    assert out.tolist() == [6.0, 6.0, 6.0]


def test_views_share_memory() -> None:
    x = torch.zeros(4, device="npu")
    x.unfold(0, 2, 2)[1].fill_(5)
    x.view(2, 2)[0, 1] = 7
    assert x.tolist() == [0.0, 7.0, 5.0, 5.0]


def test_streams_keep_memory() -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        x = torch.ones(3, device="npu") * 2
    x.record_stream(stream)
    torch.npu.current_stream().wait_stream(stream)
    del x
    torch.npu.synchronize()
    assert (torch.ones(3, device="npu") + 1).tolist() == [2.0, 2.0, 2.0]


def test_printing() -> None:
    assert str(row("npu", 3)) == "tensor([0., 1., 2.], device='npu:0')"
    assert "..., " in str(torch.zeros(2000, device="npu"))


def test_save_and_load(tmp_path: Any) -> None:
    torch.save({"x": grid("npu")}, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt")["x"], grid("cpu"))


def test_operator_without_a_kernel_is_named() -> None:
    with pytest.raises(MissingKernelError, match=r"npu::npu_geglu has no kernel on the emulated"):
        torch_npu.npu_geglu(torch.ones(2, 4, device="npu"))


def test_operator_that_torch_npu_sends_to_cann_fails_at_once() -> None:
    with pytest.raises(RuntimeError):
        torch.nn.LSTM(3, 4).npu()(torch.ones(2, 1, 3, device="npu"))


def test_bad_arguments_fail_as_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        torch.ones(2, device="npu") + torch.ones(3, device="npu")
    with pytest.raises(IndexError, match="out of bounds"):
        torch.ones(2, device="npu")[ints("npu", 5)]


def test_cpu_backed_operator_crosses_once() -> None:
    crossings = []

    @torch.library.custom_op("moe_graph_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        crossings.append(x.device.type)
        return x + x

    eager.register_cpu_backed(torch.ops.moe_graph_test.twice.default)
    assert_same(twice(row("npu")), row("cpu") * 2)
    assert crossings == ["cpu"]


def test_grouped_products() -> None:
    x, w = torch.randn(6, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    ends = torch.tensor([2, 6], dtype=torch.int32)
    got = torch._grouped_mm(x.npu(), w.npu(), offs=ends.npu())
    assert_same(got, torch._grouped_mm(x, w, offs=ends))
