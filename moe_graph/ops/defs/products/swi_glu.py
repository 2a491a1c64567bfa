"""SwiGlu and SwiGluGrad: ``y = silu(a) * b`` for ``a, b = x.chunk(2, dim)``, and its gradient.

Both work in fp32 and round once.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_graph.ops.defs.support.chunks import tiles
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.dims import UNKNOWN_RANK, Dim, floordiv, is_unknown
from moe_graph.ops.opdef import (
    Attr,
    Autograd,
    Call,
    Form,
    Input,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
    show_shape,
)
from moe_graph.ops.registry import register


def _split_dim(op: Call) -> int:
    """Return `dim` counted from the front, of a tensor whose rank is known."""
    rank = len(op.x.shape)
    if not -rank <= op.dim < rank:
        raise op.error(
            "dim", got=op.dim, want=f"in [{-rank}, {rank}) for x{show_shape(op.x.shape)}"
        )
    return int(op.dim) % rank


def _half(op: Call) -> tuple[Dim, ...]:
    dim = _split_dim(op)
    size = op.x.shape[dim]
    if isinstance(size, int) and not is_unknown(size) and size % 2:
        raise op.error("x", got=f"{size} in dim {dim}", want="an even size, for two halves")
    return (*op.x.shape[:dim], floordiv(size, 2), *op.x.shape[dim + 1 :])


def _shapes(op: Call) -> Specs:
    if not op.x.rank_known:
        return [TensorSpec(UNKNOWN_RANK, op.x.dtype)]
    return [TensorSpec(_half(op), op.x.dtype)]


def _grad_shapes(op: Call) -> Specs:
    if op.x.rank_known and op.y_grad.rank_known:
        half = _half(op)
        if len(half) != len(op.y_grad.shape):
            raise op.error("y_grad", got=f"{len(op.y_grad.shape)} dimensions", want=len(half))
        for position, (got, want) in enumerate(zip(op.y_grad.shape, half, strict=True)):
            op.expect_equal("y_grad", got, want, f"dim {position}")
    return [TensorSpec(op.x.shape, op.x.dtype)]


def _halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `x` as ``[A, 2, W]``, the two halves along the middle."""
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    return x.reshape(math.prod(before), 2, x.shape[dim] // 2 * math.prod(after))


def _compute(op: Call) -> Tensors:
    halves = _halves(op.x, _split_dim(op))
    y = op.new_output(_half(op), op.x.dtype, op.x.device)
    rows, _, width = halves.shape
    flat_y = y.view(rows, width)

    def work(tile: tuple[slice, slice]) -> None:
        chunk, columns = tile
        gate, up = halves[chunk, :, columns].unbind(1)
        silu = torch.nn.functional.silu(gate.to(torch.float32))
        torch.mul(silu, up, out=flat_y[chunk, columns])

    run_parts(work, tiles(rows, width))
    return [y]


def _naive(op: Call) -> Tensors:
    half = op.x.shape[op.dim] // 2
    gate = op.x.narrow(op.dim, 0, half).to(torch.float32)
    up = op.x.narrow(op.dim, half, half).to(torch.float32)
    return [(gate / (1 + torch.exp(-gate)) * up).to(op.x.dtype)]


def _grad_compute(op: Call) -> Tensors:
    dim = _split_dim(op)
    halves = _halves(op.x, dim)
    rows, _, width = halves.shape
    y_grad = op.y_grad.reshape(rows, width)
    grad_x = op.new_output(op.x.shape, op.x.dtype, op.x.device)
    grad_halves = _halves(grad_x, dim)

    def work(tile: tuple[slice, slice]) -> None:
        chunk, columns = tile
        gate, up = halves[chunk, :, columns].to(torch.float32).unbind(1)
        grad = y_grad[chunk, columns].to(torch.float32)
        # exp is computed twice: the passes over memory that keeping it costs take longer.
        of_silu = grad * up
        target = grad_halves[chunk, 0, columns]
        if target.dtype is torch.float32:
            torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=target)
        else:
            target.copy_(torch.ops.aten.silu_backward(of_silu, gate))
        torch.mul(torch.nn.functional.silu(gate), grad, out=grad_halves[chunk, 1, columns])

    run_parts(work, tiles(rows, width))
    return [grad_x]


def _grad_naive(op: Call) -> Tensors:
    half = op.x.shape[op.dim] // 2
    gate = op.x.narrow(op.dim, 0, half).to(torch.float32)
    up = op.x.narrow(op.dim, half, half).to(torch.float32)
    grad = op.y_grad.to(torch.float32)
    sigmoid = 1 / (1 + torch.exp(-gate))
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    return [torch.cat([grad_gate, grad_up], op.dim).to(op.x.dtype)]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(op.x)
    ctx.dim = op.dim


def _backward(ctx: Any, grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
    (x,) = ctx.saved_tensors
    return {"x": torch.ops.moe_graph.swi_glu_grad(grad, x, ctx.dim)}


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_DIM = Attr("dim", "Int", -1)

SWIGLU = register(
    OpDef(
        ge_type="SwiGlu",
        inputs=(Input("x", _FLOATS),),
        outputs=(Output("y"),),
        attrs=(_DIM,),
        shape_rule=_shapes,
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        forms=(Form("halves of the last dim", {"x": "T 2*N"}),),
        function="swiglu",
        doc="REG_OP(SwiGlu); torch_npu npu_swiglu",
    )
)

SWIGLU_GRAD = register(
    OpDef(
        ge_type="SwiGluGrad",
        inputs=(Input("y_grad", _FLOATS), Input("x", _FLOATS)),
        outputs=(Output("y"),),
        attrs=(_DIM,),
        shape_rule=_grad_shapes,
        compute=_grad_compute,
        naive=_grad_naive,
        no_gradient="it is a gradient itself",
        forms=(Form("halves of the last dim", {"y_grad": "T N", "x": "T 2*N"}),),
        doc="REG_OP(SwiGluGrad); torch_npu npu_swiglu_backward",
    )
)
