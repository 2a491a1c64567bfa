"""The shape rule of MoeInitRoutingV3 and the checks between its arguments."""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.init_routing.int8_rounding import check_static
from moe_graph.ops.dims import UNKNOWN, Dim, ceildiv, is_unknown, known_less, minimum, mul
from moe_graph.ops.ir import dtype_name
from moe_graph.ops.opdef import Call, Specs, TensorSpec, show_shape

DROPLESS, DROP_PAD = 0, 1
CUMSUM, COUNT, KEY_VALUE = 0, 1, 2
GATHER, SCATTER = 0, 1
NO_QUANT, STATIC, DYNAMIC, INT4_DYNAMIC, HIF8_PER_TENSOR = -1, 0, 1, 13, 7
MAX_EXPERTS = 10240

QUANT_MODES = (*range(-1, 10), *range(11, 18))
_MX = (2, 3, 16, 17)
_PER_128 = (4, 5, 14, 15)
_PER_BLOCK = (11, 12)
_WITHOUT_SCALE_OUTPUT = (STATIC, 6, HIF8_PER_TENSOR)
_MX_FP4 = 9

_E5M2 = (2, 4, 11, 14, 16)
_E4M3 = (3, 5, 12, 15, 17)
_E8M0_SCALES = (2, 3, 9, 16, 17)


def expert_range(op: Call) -> tuple[int, int]:
    """Return the experts ``[start, end)`` of this rank: all, when no range is given."""
    return tuple(op.active_expert_range) or (0, op.expert_num)


def infer_shapes(op: Call) -> Specs:
    """Return the specs of the four outputs."""
    tokens, hidden = op.dims("x", rank=2)
    id_tokens, top_k = op.dims("expert_idx", rank=2)
    op.expect_equal("expert_idx", id_tokens, tokens, "dim 0")
    tokens = id_tokens if is_unknown(tokens) else tokens
    _check_attributes(op, tokens)
    _check_scale(op, tokens, hidden)

    copies = mul(tokens, top_k)
    start, end = expert_range(op)
    partial = (start, end) != (0, op.expert_num)
    if op.drop_pad_mode == DROP_PAD:
        rows: Dim = op.expert_num * op.expert_capacity
        expanded = TensorSpec((op.expert_num, op.expert_capacity, hidden), _row_dtype(op))
    else:
        rows = minimum(copies, op.active_num) if op.active_num > 0 else copies
        expanded = TensorSpec((rows, hidden), _row_dtype(op), bounds=(0,) if partial else ())
    return [
        expanded,
        TensorSpec((copies,), torch.int32),
        _counts(op, end - start),
        _scales(op, rows, copies, hidden, expanded.bounds),
    ]


def _counts(op: Call, experts: int) -> TensorSpec | None:
    if not op.expert_tokens_num_flag:
        return None
    if op.expert_tokens_num_type == KEY_VALUE:
        return TensorSpec((op.expert_num, 2), torch.int64, bounds=(0,))
    return TensorSpec((experts,), torch.int64)


def _scales(
    op: Call, rows: Dim, copies: Dim, hidden: Dim, bounds: tuple[int, ...]
) -> TensorSpec | None:
    mode = op.quant_mode
    dtype = torch.float8_e8m0fnu if mode in _E8M0_SCALES else torch.float32
    if mode in _WITHOUT_SCALE_OUTPUT:
        return None
    if mode in _MX:
        pairs = ceildiv(hidden, 64)
        return TensorSpec((copies, mul(pairs, 2)), dtype, bounds)
    if mode in _PER_128:
        return TensorSpec((copies, ceildiv(hidden, 128)), dtype, bounds)
    if mode in _PER_BLOCK:
        return TensorSpec((copies, ceildiv(hidden, 256), 2), dtype, bounds)
    if mode == _MX_FP4 or _has_mx_scale(op):
        return TensorSpec((rows, ceildiv(hidden, 64), 2), dtype, bounds)
    return TensorSpec((copies if mode == 8 else rows,), dtype, bounds)


def _row_dtype(op: Call) -> torch.dtype:
    mode = op.quant_mode
    if mode in (STATIC, DYNAMIC):
        return torch.int8
    if mode in _E5M2:
        return torch.float8_e5m2
    if mode in _E4M3:
        return torch.float8_e4m3fn
    if mode == INT4_DYNAMIC:
        return torch.int4  # type: ignore[attr-defined]
    if mode == _MX_FP4:
        return torch.float4_e2m1fn_x2
    if mode in (6, HIF8_PER_TENSOR, 8):
        return torch.uint8  # PyTorch has no hifloat8; torch_npu holds it in uint8
    return op.x.dtype


def _check_attributes(op: Call, tokens: Dim) -> None:
    if not 1 <= op.expert_num <= MAX_EXPERTS:
        raise op.error("expert_num", got=op.expert_num, want=f"in [1, {MAX_EXPERTS}]")
    _check_range(op)
    drop_pad = op.expect_one_of("drop_pad_mode", (DROPLESS, DROP_PAD)) == DROP_PAD
    if drop_pad:
        op.expect_at_least("expert_capacity", 0)
        has_tokens = not isinstance(tokens, int) or tokens > 0
        if has_tokens and known_less(tokens, op.expert_capacity):
            raise op.error(
                "expert_capacity", got=op.expert_capacity, want=f"<= {tokens}, the rows of x"
            )
    else:
        op.expect_at_least("active_num", -1)
    op.expect_one_of("expert_tokens_num_type", (CUMSUM, COUNT, KEY_VALUE))
    op.expect_one_of("row_idx_type", (GATHER,) if drop_pad else (GATHER, SCATTER))
    op.expect_one_of("quant_mode", QUANT_MODES)


def _check_range(op: Call) -> None:
    given = tuple(op.active_expert_range)
    if not given:
        return
    in_order = len(given) == 2 and 0 <= given[0] < given[1] <= MAX_EXPERTS
    if not in_order:
        raise op.error(
            "active_expert_range",
            got=list(given),
            want=f"[start, end] with 0 <= start < end <= {MAX_EXPERTS}, or nothing for all experts",
        )


def _has_mx_scale(op: Call) -> bool:
    return op.scale is not None and op.scale.rank_known and len(op.scale.shape) == 3


def _check_scale(op: Call, tokens: Dim, hidden: Dim) -> None:
    mode = op.quant_mode
    if mode == STATIC:
        check_static(op)
    if op.scale is None or not op.scale.rank_known:
        return
    if mode == NO_QUANT:
        if len(op.scale.shape) not in (1, 3):
            raise op.error("scale", got=f"shape {show_shape(op.scale.shape)}", want="[T]")
        op.expect_equal("scale", op.scale.shape[0], tokens, "dim 0")
    elif mode == HIF8_PER_TENSOR:
        (size,) = op.dims("scale", rank=1)
        op.expect_equal("scale", size, 1, "dim 0")
    elif mode in (DYNAMIC, INT4_DYNAMIC):
        rows, width = op.dims("scale", rank=2)
        start, end = expert_range(op)
        allowed = (1,) if mode == INT4_DYNAMIC else (1, end - start)
        if isinstance(rows, int) and rows not in (UNKNOWN, *allowed):
            raise op.error("scale", got=f"dim 0 {rows}", want=" or ".join(map(str, allowed)))
        op.expect_equal("scale", width, hidden, "dim 1")


def check_tiling(op: Call) -> None:
    """Raise on what only the running op refuses."""
    if op.soc is not Soc.ASCEND950 and op.quant_mode not in (NO_QUANT, STATIC, DYNAMIC):
        raise op.error("quant_mode", got=op.quant_mode, want="-1, 0 or 1", limit=True)
    _check_quantised_dtype(op)
    start, end = expert_range(op)
    if end > op.expert_num:
        raise op.error("active_expert_range", got=[start, end], want=f"within [0, {op.expert_num}]")
    if op.drop_pad_mode == DROP_PAD:
        _check_drop_pad(op, full_range=(start, end) == (0, op.expert_num))
    if op.soc is Soc.ASCEND950:
        _check_950(op)


def _check_quantised_dtype(op: Call) -> None:
    """Raise unless some column of the IR quantises the dtype of x as quant_mode says."""
    if op.quant_mode == NO_QUANT:
        return
    wanted = {torch.float16, torch.bfloat16}
    if op.quant_mode in (STATIC, DYNAMIC):
        wanted.add(torch.float32)
    elif op.quant_mode == INT4_DYNAMIC:
        wanted = {torch.bfloat16, torch.float32}
    if op.x.dtype not in wanted:
        names = sorted(map(dtype_name, wanted))
        raise op.error(
            "x",
            got=dtype_name(op.x.dtype),
            want=f"{' or '.join(names)} with quant_mode {op.quant_mode}",
        )


def _check_drop_pad(op: Call, *, full_range: bool) -> None:
    op.expect_at_least("expert_capacity", 1)
    if not full_range:
        raise op.error(
            "active_expert_range",
            got=list(op.active_expert_range),
            want=f"[0, {op.expert_num}] or nothing, with drop_pad_mode 1",
        )
    if op.expert_tokens_num_flag and op.expert_tokens_num_type != COUNT:
        raise op.error(
            "expert_tokens_num_type", got=op.expert_tokens_num_type, want="1 with drop_pad_mode 1"
        )


def _check_950(op: Call) -> None:
    if not op.expert_tokens_num_flag:
        raise op.error("expert_tokens_num_flag", got=False, want=True, limit=True)
    if op.drop_pad_mode == DROP_PAD:
        if op.quant_mode != NO_QUANT:
            raise op.error(
                "quant_mode", got=op.quant_mode, want="-1 with drop_pad_mode 1", limit=True
            )
        return
    (tokens, _), (_, top_k) = op.dims("x", rank=2), op.dims("expert_idx", rank=2)
    copies = mul(tokens, top_k)
    if op.active_num > 0 and isinstance(copies, int) and copies not in (UNKNOWN, op.active_num):
        raise op.error("active_num", got=op.active_num, want=f"-1, 0 or {copies}", limit=True)
