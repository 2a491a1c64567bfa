"""From fp32 values to int8, as the routing ops round on A2 and A3.

The device rounds to the nearest even int32, goes through fp16 and truncates to int8. Every int8 is
exact in fp16, so that the value is the rounded one; beyond the range of int8 it saturates, and NaN
becomes 0.
"""

from __future__ import annotations

import torch

from moe_graph.ops.opdef import Call

INT8_MAX = 127.0


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 `values`, which are overwritten, as int8."""
    return values.round_().nan_to_num_(nan=0.0).clamp_(-128, 127).to(torch.int8)


def check_static(op: Call) -> None:
    """Check what the static quantisation of :func:`static_int8` needs: one scale, one offset.

    Raises:
        OpError: one is absent or of another shape.
    """
    for name in ("scale", "offset"):
        if getattr(op, name) is None:
            raise op.error(name, got="nothing", want="[1], for quant_mode 0")
        (size,) = op.dims(name, rank=1)
        op.expect_equal(name, size, 1, "dim 0")


def static_int8(rows: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return ``int8(rows * scale + offset)``: one scale and offset, both steps rounded to fp32."""
    return to_int8((rows.to(torch.float32) * scale).add_(offset))


def dynamic_int8(
    rows: torch.Tensor, smooth: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[R, H]`` int8 rows and their ``[R]`` scales ``max|y| / 127``.

    ``y`` is the row, times its row of `smooth` (``[R, H]``) where that is given. A row of zeros has
    the scale 0, and ``0 / 0`` becomes 0.
    """
    values = rows.to(torch.float32, copy=True)
    if smooth is not None:
        values.mul_(smooth)
    if values.shape[1] == 0:
        return values.to(torch.int8), values.new_zeros(values.shape[0])
    scale = values.abs().amax(1).div_(INT8_MAX)
    return to_int8(values.div_(scale.unsqueeze(1))), scale
