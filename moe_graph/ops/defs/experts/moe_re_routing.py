"""MoeReRouting: bring rows that arrive rank by rank into the order of experts.

``expert_token_num_per_rank[r, e] = n`` says that rank r sends n rows for expert e. ``tokens`` has
the rows by rank and, within a rank, by expert; ``permute_tokens`` has them by expert and, within
an expert, by rank. ``expert_token_num[e]`` is the sum over r.

``permute_token_idx`` says for each row of the result where it was (idx_type 0), or for each row of
``tokens`` where it went (idx_type 1, Ascend 950). Rows beyond the sum of all counts belong to
nobody: the device writes none there.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.poison import poison_, poisoned
from moe_graph.ops.dims import UNKNOWN
from moe_graph.ops.limit import attribute, dim
from moe_graph.ops.opdef import (
    Attr,
    Call,
    Form,
    Input,
    Limit,
    OpDef,
    Output,
    Specs,
    Tensors,
    TensorSpec,
)
from moe_graph.ops.registry import register


def _shapes(op: Call) -> Specs:
    op.dims("tokens", rank=2)
    experts = op.dims("expert_token_num_per_rank", rank=2)[1]
    rows = op.tokens.shape[0] if op.tokens.rank_known else UNKNOWN
    scales = op.per_token_scales or TensorSpec((rows,), torch.float32)
    return [
        TensorSpec(op.tokens.shape, op.tokens.dtype),
        TensorSpec(scales.shape, scales.dtype),
        TensorSpec((rows,), torch.int32),
        TensorSpec((experts,), op.expert_token_num_per_rank.dtype),
    ]


def _tiling(op: Call) -> None:
    op.expect_one_of("expert_token_num_type", (1,))
    op.expect_one_of("idx_type", (0, 1) if op.soc is Soc.ASCEND950 else (0,))
    scales = op.per_token_scales
    if scales is None or not scales.rank_known:
        return
    if not scales.shape:
        raise op.error("per_token_scales", got=scales, want="at least 1 dimension")
    op.expect_equal("per_token_scales", scales.shape[0], op.dims("tokens", 2)[0], "dim 0")


def _check_counts(op: Call) -> int:
    counts: torch.Tensor = op.expert_token_num_per_rank
    if counts.numel() and int(counts.min()) < 0:
        raise op.error("expert_token_num_per_rank", got=int(counts.min()), want="counts >= 0")
    total, rows = int(counts.sum()), int(op.tokens.shape[0])
    if total > rows:
        raise op.error("expert_token_num_per_rank", got=f"{total} rows", want=f"<= {rows} rows")
    return total


def _sources(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return the source of each row of the result, int32."""
    counts = counts.to(torch.int64)
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    lengths = counts.t().flatten()
    shifts = starts.t().flatten() - (lengths.cumsum(0) - lengths)
    shift = torch.repeat_interleave(shifts.to(torch.int32), lengths, output_size=total)
    return shift.add_(torch.arange(total, dtype=torch.int32, device=counts.device))


def _gather_rows(rows: torch.Tensor, source: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Copy rows, of whatever dtype, as bytes: narrow floats have no arithmetic on the CPU."""
    total = source.numel()
    if rows.shape[0] > total:
        _poison_rows(into[total:])
    if rows.numel():
        width = rows[0].numel() * rows.element_size()
        bytes_in = rows.contiguous().view(torch.uint8).view(-1, width)
        bytes_out = into.view(torch.uint8).view(-1, width)
        torch.index_select(bytes_in, 0, source, out=bytes_out[:total])
    return into


def _poison_rows(rows: torch.Tensor) -> None:
    """Poison rows of any dtype; one of less than 16 bits per element gets the integers' bytes."""
    if rows.is_floating_point() and rows.element_size() == 1:
        poison_(rows.view(torch.uint8))
    else:
        poison_(rows)


def _assemble(op: Call, source: torch.Tensor) -> Tensors:
    """Return the outputs, given the source of each row of the result."""
    tokens: torch.Tensor = op.tokens
    counts: torch.Tensor = op.expert_token_num_per_rank
    rows, total = tokens.shape[0], source.numel()
    permuted = _gather_rows(
        tokens, source, op.new_output(tokens.shape, tokens.dtype, tokens.device)
    )
    scales = poisoned((rows,), torch.float32, tokens.device)
    if op.per_token_scales is not None:
        given: torch.Tensor = op.per_token_scales
        scales = _gather_rows(given, source, torch.empty_like(given).contiguous())
    index = poisoned((rows,), torch.int32, tokens.device)
    if op.idx_type == 0:
        index[:total] = source
    else:
        index[source] = torch.arange(total, dtype=torch.int32, device=tokens.device)
    return [permuted, scales, index, counts.sum(0, dtype=counts.dtype)]


def _compute(op: Call) -> Tensors:
    return _assemble(op, _sources(op.expert_token_num_per_rank, _check_counts(op)))


def _naive(op: Call) -> Tensors:
    _check_counts(op)
    counts: list[list[Any]] = op.expert_token_num_per_rank.tolist()
    block: dict[tuple[int, int], range] = {}
    start = 0
    for rank, per_expert in enumerate(counts):
        for expert, count in enumerate(per_expert):
            block[rank, expert] = range(start, start + count)
            start += count
    by_expert = sorted(block, key=lambda rank_and_expert: rank_and_expert[::-1])
    source = [row for key in by_expert for row in block[key]]
    return _assemble(op, torch.tensor(source, dtype=torch.int32))


_E5M2, _E4M3, _E2M1 = torch.float8_e5m2, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
_E8M0 = torch.float8_e8m0fnu
_ROWS = (torch.float16, torch.bfloat16, torch.int8) * 2
_COUNTS = (torch.int32,) * 3 + (torch.int64,) * 3
_SCALES = (torch.float32,) * 6
_NARROW = (_E5M2,) * 4 + (_E4M3,) * 4 + (_E2M1,) * 4
_SOURCE = "moe_re_routing/docs/aclnnMoeReRouting.md"

OPDEF = register(
    OpDef(
        ge_type="MoeReRouting",
        inputs=(
            Input("tokens", _ROWS, dtypes_950=_ROWS + _NARROW),
            Input(
                "expert_token_num_per_rank",
                _COUNTS,
                dtypes_950=_COUNTS + (torch.int32, torch.int64) * 6,
            ),
            Input(
                "per_token_scales",
                _SCALES,
                "optional",
                _SCALES + (_E8M0, _E8M0, torch.float32, torch.float32) * 3,
            ),
        ),
        outputs=(
            Output("permute_tokens"),
            Output("permute_per_token_scales"),
            Output("permute_token_idx", dtype=torch.int32),
            Output("expert_token_num"),
        ),
        attrs=(Attr("expert_token_num_type", "Int", 1), Attr("idx_type", "Int", 0)),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            Limit("tokens", "H", dim("tokens", 1), _SOURCE, low=1, high=16383),
            Limit(
                "expert_token_num_type",
                "expert_token_num_type",
                attribute("expert_token_num_type"),
                _SOURCE,
                one_of=(1,),
            ),
        ),
        compute=_compute,
        naive=_naive,
        no_gradient="torch_npu and GE define none for MoeReRouting",
        forms=(
            Form(
                "scales",
                {"tokens": "A H", "expert_token_num_per_rank": "N E", "per_token_scales": "A"},
            ),
            Form("rows alone", {"tokens": "A H", "expert_token_num_per_rank": "N E"}),
        ),
        function="moe_re_routing",
        doc="ops-transformer moe/moe_re_routing: infershape; docs/aclnnMoeReRouting.md",
    )
)
