"""MoeInitRoutingV2: sort the token copies by expert and gather their rows.

Let ``s`` be the stable ascending argsort of the flat ids ``[T * K]``.

- dropless (``drop_pad_mode=0``): ``expanded_x[i] = x[s[i] // K]`` and
  ``expanded_row_idx[s[i]] = i``. ``active_num > 0`` keeps the first ``active_num`` rows;
  ``expanded_row_idx`` still covers all copies.
- drop/pad (``drop_pad_mode=1``): copy ``s[i]`` is number ``r`` of its expert ``e``. It goes to slot
  ``e * expert_capacity + r`` when ``r < expert_capacity`` and is dropped (index -1) otherwise;
  slots that stay free are zero.

Ids are sorted through fp32 keys on the device, so they must be below 2**24.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.ops.defs.support.gather import gather_rows
from moe_graph.ops.dims import Dim, is_unknown, known_less, minimum, mul
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
)
from moe_graph.ops.registry import register

MAX_EXACT_ID = 1 << 24
"""Ids are compared as fp32 on the device."""

DROPLESS, DROP_PAD = 0, 1
NO_COUNTS, CUMSUM, COUNT = 0, 1, 2


def infer_shapes(op: Call) -> Specs:
    """Return the specs of the four outputs; MoeInitRoutingQuantV2 begins like this."""
    tokens, hidden = op.dims("x", rank=2)
    id_tokens, top_k = op.dims("expert_idx", rank=2)
    op.expect_equal("expert_idx", id_tokens, tokens, "dim 0")
    op.expect_at_least("active_num", 0)
    op.expect_at_least("expert_capacity", 0)
    op.expect_at_least("expert_num", 0)
    drop_pad = op.expect_one_of("drop_pad_mode", (DROPLESS, DROP_PAD)) == DROP_PAD
    flag = op.expect_one_of("expert_tokens_count_or_cumsum_flag", (NO_COUNTS, CUMSUM, COUNT))
    if drop_pad:
        op.expect_at_least("expert_capacity", 1)
        op.expect_at_least("expert_num", 1)
        has_tokens = not isinstance(tokens, int) or tokens > 0
        if has_tokens and known_less(tokens, op.expert_capacity):
            raise op.error(
                "expert_capacity", got=op.expert_capacity, want=f"<= {tokens}, the rows of x"
            )
    if flag != NO_COUNTS and op.expert_num == 0:
        raise op.error("expert_num", got=0, want="> 0 when tokens per expert are asked for")

    copies = mul(id_tokens if is_unknown(tokens) else tokens, top_k)
    expanded: tuple[Dim, ...]
    if drop_pad:
        expanded = (op.expert_num, op.expert_capacity, hidden)
    else:
        rows = minimum(copies, op.active_num) if op.active_num > 0 else copies
        expanded = (rows, hidden)
    per_expert = TensorSpec((op.expert_num,), torch.int32)
    return [
        TensorSpec(expanded, op.x.dtype),
        TensorSpec((copies,), torch.int32),
        per_expert if not drop_pad and flag != NO_COUNTS else None,
        per_expert if drop_pad and op.expert_tokens_before_capacity_flag else None,
    ]


def _check_ids(op: Call) -> None:
    """Raise on ids that the device would turn into writes out of bounds or a wrong order."""
    ids = op.expert_idx
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    limit = op.expert_num or MAX_EXACT_ID
    if low < 0 or high >= limit:
        meaning = "expert_num" if op.expert_num else "exact as fp32 sort keys"
        raise op.error(
            "expert_idx", got=f"ids from {low} to {high}", want=f"ids in [0, {limit}) ({meaning})"
        )


def _compute(op: Call) -> Tensors:
    _check_ids(op)
    ids = op.expert_idx.reshape(-1)
    order = torch.argsort(ids, stable=True)
    counts = _counts(op, ids)
    if op.drop_pad_mode == DROP_PAD:
        return _compute_drop_pad(op, ids, order, counts)

    copies = ids.numel()
    rows = min(op.active_num, copies) if op.active_num > 0 else copies
    position = torch.arange(copies, dtype=torch.int32, device=ids.device)
    row_idx = torch.empty_like(position).scatter_(0, order, position)
    del position
    # In place: eight bytes per copy are all that is held beside the outputs.
    source = order[:rows].div_(max(op.expert_idx.shape[1], 1), rounding_mode="floor")
    per_expert = None
    if op.expert_tokens_count_or_cumsum_flag != NO_COUNTS:
        assert counts is not None
        per_expert = counts
        if op.expert_tokens_count_or_cumsum_flag == CUMSUM:
            per_expert = counts.cumsum(0)
        per_expert = per_expert.to(torch.int32)
    expanded = op.new_output((rows, op.x.shape[1]), op.x.dtype, op.x.device)
    gather_rows(op.x, source, expanded)
    return [expanded, row_idx, per_expert, None]


def _counts(op: Call, ids: torch.Tensor) -> torch.Tensor | None:
    needed = op.drop_pad_mode == DROP_PAD or op.expert_tokens_count_or_cumsum_flag != NO_COUNTS
    return torch.bincount(ids, minlength=op.expert_num) if needed else None


def _compute_drop_pad(
    op: Call, ids: torch.Tensor, order: torch.Tensor, counts: torch.Tensor | None
) -> Tensors:
    assert counts is not None
    capacity, top_k = op.expert_capacity, max(op.expert_idx.shape[1], 1)
    sorted_ids = ids.index_select(0, order).to(torch.int64)
    first_row = counts.cumsum(0) - counts
    rank = torch.arange(ids.numel(), device=ids.device) - first_row[sorted_ids]
    kept = rank < capacity
    slot = torch.where(kept, sorted_ids * capacity + rank, -1)
    row_idx = torch.empty_like(ids, dtype=torch.int32).scatter_(0, order, slot.to(torch.int32))

    expanded = op.x.new_zeros((op.expert_num * capacity, op.x.shape[1]))
    source = torch.div(order[kept], top_k, rounding_mode="floor")
    expanded.index_copy_(0, slot[kept], op.x.index_select(0, source))
    before = counts.to(torch.int32) if op.expert_tokens_before_capacity_flag else None
    return [expanded.view(op.expert_num, capacity, -1), row_idx, None, before]


def _naive(op: Call) -> Tensors:
    _check_ids(op)
    top_k = op.expert_idx.shape[1]
    ids = op.expert_idx.reshape(-1).tolist()
    order = sorted(range(len(ids)), key=lambda copy: ids[copy])
    row_idx = [-1] * len(ids)
    count = [ids.count(expert) for expert in range(op.expert_num)]
    hidden = op.x.shape[1]

    if op.drop_pad_mode == DROP_PAD:
        expanded = torch.zeros((op.expert_num, op.expert_capacity, hidden), dtype=op.x.dtype)
        seen = [0] * op.expert_num
        for copy in order:
            expert = ids[copy]
            rank = seen[expert]
            seen[expert] += 1
            if rank < op.expert_capacity:
                row_idx[copy] = expert * op.expert_capacity + rank
                expanded[expert, rank] = op.x[copy // top_k]
        before = _int32(count) if op.expert_tokens_before_capacity_flag else None
        return [expanded, _int32(row_idx), None, before]

    rows = min(op.active_num, len(ids)) if op.active_num > 0 else len(ids)
    expanded = torch.empty((rows, hidden), dtype=op.x.dtype)
    for row, copy in enumerate(order):
        row_idx[copy] = row
        if row < rows:
            expanded[row] = op.x[copy // top_k]
    per_expert = {
        NO_COUNTS: None,
        CUMSUM: _int32([sum(count[: expert + 1]) for expert in range(op.expert_num)]),
        COUNT: _int32(count),
    }[op.expert_tokens_count_or_cumsum_flag]
    return [expanded, _int32(row_idx), per_expert, None]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(outputs[1])
    ctx.top_k = int(op.expert_idx.shape[1])
    ctx.drop_pad_mode = op.drop_pad_mode
    ctx.active_num = 0
    if op.drop_pad_mode == DROPLESS and op.active_num > 0:
        # The gradient op wants exactly the rows that exist, which `active_num` may exceed.
        ctx.active_num = op.active_num if op.active_num < outputs[1].shape[0] else 0


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> dict[str, torch.Tensor | None]:
    (row_idx,) = ctx.saved_tensors
    return {
        "x": torch.ops.moe_graph.moe_init_routing_v2_grad(
            grad, row_idx, ctx.top_k, ctx.drop_pad_mode, ctx.active_num
        )
    }


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

OPDEF = register(
    OpDef(
        ge_type="MoeInitRoutingV2",
        inputs=(
            Input("x", _FLOATS, dtypes_950=_FLOATS * 2),
            Input(
                "expert_idx",
                (torch.int32,),
                dtypes_950=(torch.int32,) * 3 + (torch.int64,) * 3,
            ),
        ),
        outputs=(
            Output("expanded_x"),
            Output("expanded_row_idx", dtype=torch.int32),
            Output("expert_tokens_count_or_cumsum", required=False, dtype=torch.int32),
            Output("expert_tokens_before_capacity", required=False, dtype=torch.int32),
        ),
        attrs=(
            Attr("active_num", "Int", 0),
            Attr("expert_capacity", "Int", 0),
            Attr("expert_num", "Int", 0),
            Attr("drop_pad_mode", "Int", 0),
            Attr("expert_tokens_count_or_cumsum_flag", "Int", 0),
            Attr("expert_tokens_before_capacity_flag", "Bool", False),
        ),
        shape_rule=infer_shapes,
        checked_outputs=("expanded_x", "expanded_row_idx"),
        forms=(
            Form("dropless", {"x": "T H", "expert_idx": "T K"}),
            Form(
                "first rows, counts",
                {"x": "T H", "expert_idx": "T K"},
                {
                    "active_num": "A",
                    "expert_num": "E",
                    "expert_tokens_count_or_cumsum_flag": 2,
                },
            ),
            Form(
                "drop/pad",
                {"x": "T H", "expert_idx": "T K"},
                {
                    "drop_pad_mode": 1,
                    "expert_num": "E",
                    "expert_capacity": "C",
                    "expert_tokens_before_capacity_flag": True,
                },
            ),
        ),
        function="moe_init_routing",
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        doc="ops-transformer moe/moe_init_routing_v2: infershape, tiling, membase kernels",
    )
)
