"""Every case that TorchAir's own authors declare for their converters, against eager PyTorch.

The converters carry lists of supported arguments (``declare_supported``), which TorchAir's hardware
tests run. Here the cases of one ATen op become one graph.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from through_torchair import check
from torchair._ge_concrete_graph import fx2ge_converter
from torchair._ge_concrete_graph.supported_declaration import _TypedTensor

#: ATen op -> why its declared cases are not run, or the numbers of the cases that are left out.
NOT_RUN: dict[str, str] = {
    "aten.bernoulli.Tensor": "random",
    "aten.bernoulli.default": "random",
    "aten.bernoulli.p": "random",
    "aten.native_layer_norm.default": "the dtype of mean differs between CPU and NPU",
    "aten.rand.default": "random",
    "aten.randint.default": "random",
    "aten.randn.default": "random",
    "aten.randn.generator": "random",
    "aten.select_backward.default": "TorchAir scatters into Empty and leaves other rows unwritten",
    "aten.uniform.default": "random",
}
for _name in (
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit_functional.default",
    "native_batch_norm_backward.default",
    "native_group_norm_backward.default",
):
    NOT_RUN[f"aten.{_name}"] = "training of batch norm is not emulated"

#: GE's Gelu is the tanh approximation, whatever ATen asks for.
TOLERANCE = {
    "aten.gelu.default": (1e-3, 1e-3),
    "aten.gelu_backward.default": (2e-3, 2e-3),
    # the sum is taken in fp32 but stored in fp16 before the cast to the dtype that was asked for
    "aten.linalg_vector_norm.default": (1e-3, 1e-3),
}


def _make(value: Any) -> Any:
    """Turn a declared argument into a real one."""
    if isinstance(value, list | tuple):
        return type(value)(_make(each) for each in value)
    if not isinstance(value, _TypedTensor):
        return value
    if value.value is not None:
        return torch.tensor(value.value, dtype=value.dtype)
    if any(not isinstance(dim, int) for dim in value.dims):
        raise ValueError("dims that are no numbers")
    if value.dtype is torch.bool:
        return torch.rand(value.dims) > 0.5
    if value.dtype.is_complex:
        return torch.rand(value.dims, dtype=value.dtype)
    low, high = value.value_range or ((0, 1) if value.dtype.is_floating_point else (0, 2))
    if value.dtype.is_floating_point:
        return (torch.rand(value.dims) * (high - low) + low).to(value.dtype)
    return torch.randint(int(low), max(int(high), int(low) + 1), value.dims, dtype=value.dtype)


def _cases(op: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the declared cases of an op that eager PyTorch can run on the CPU."""
    torch.manual_seed(zlib.crc32(str(op).encode()))
    cases = []
    for support in DECLARED[op]:
        try:
            case = _make(support.args), {key: _make(each) for key, each in support.kwargs.items()}
            op(*case[0], **case[1])
        except Exception:
            continue
        cases.append(case)
    return cases


DECLARED = {
    op: converter._supported_cases
    for op, converter in fx2ge_converter._declare_supported_converters().items()
    if isinstance(op, torch._ops.OpOverload)
}


@pytest.mark.parametrize("op", DECLARED, ids=str)
def test_declared_cases(op: torch._ops.OpOverload) -> None:
    if str(op) in NOT_RUN:
        pytest.skip(NOT_RUN[str(op)])
    cases = _cases(op)
    if not cases:
        pytest.skip("no declared case runs eagerly on the CPU")

    def run_all(cases: Any) -> Any:
        return [op(*args, **kwargs) for args, kwargs in cases]

    check(run_all, (cases,), tolerance=TOLERANCE.get(str(op)))
