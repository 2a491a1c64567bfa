"""MoeGatingTopK: routers with a selection bias, expert groups and a scaling factor.

- ``out = norm(x)``, fp32: softmax (``norm_type`` 0), sigmoid (1), square root of softplus (2, on
  Ascend 950); returned where ``out_flag`` asks for it, else unwritten.
- selection by ``out + bias``: with ``group_count > 1`` the scores of a group are its largest
  (``group_select_mode`` 0) or the sum of its two largest (1); only the ``k_group`` best groups take
  part. The k largest that are left are chosen, of equal ones the lower expert first.
- ``y = out[chosen]``, without the bias; divided by ``sum(y) + eps`` over the k chosen where
  ``norm_type`` is 1 or 2 or ``renorm`` is 1; times ``routed_scaling_factor``; rounded once.
- hash mode: the experts of token i are ``tid2eid[input_ids[i]]``, nothing is selected.

The page divides by the sum over all experts; the op, and its text for the hash mode, over the k.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.gating.norms import (
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    divided_grad,
    normalise,
    normalise_grad,
    normalise_in_chunks,
    scatter_to_experts,
)
from moe_graph.ops.defs.gating.ranking import ranked, top_indices
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.support.chunks import row_chunks
from moe_graph.ops.defs.support.poison import poisoned
from moe_graph.ops.defs.support.workers import run_parts
from moe_graph.ops.limit import dim
from moe_graph.ops.opdef import (
    Attr,
    Autograd,
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

MAX_EXPERTS = 2048
LARGEST, TWO_LARGEST = 0, 1
_LANES = 32  # the scores of a group start at a multiple of this on the device


def _shapes(op: Call) -> Specs:
    rows, experts = op.dims("x", rank=2)
    op.expect_at_least("k", 0)
    selected = (rows, op.k)
    return [
        TensorSpec(selected, op.x.dtype),
        TensorSpec(selected, torch.int32),
        TensorSpec((rows, experts), torch.float32),
    ]


def _tiling(op: Call) -> None:
    norms = (SOFTMAX, SIGMOID, SQRT_SOFTPLUS)
    op.expect_one_of("norm_type", norms if op.soc is Soc.ASCEND950 else norms[:2])
    op.expect_one_of("renorm", (0, 1))
    op.expect_one_of("group_select_mode", (LARGEST, TWO_LARGEST))
    _, experts = op.dims("x", rank=2)
    if op.bias is not None:
        (size,) = op.dims("bias", rank=1)
        op.expect_equal("bias", size, experts, "dim 0")
    op.expect_at_least("k", 1)
    op.expect_at_least("group_count", 1)
    if not 1 <= op.k_group <= op.group_count:
        raise op.error("k_group", got=op.k_group, want=f"in [1, {op.group_count}], group_count")
    if isinstance(experts, int) and experts > 0:
        _check_groups(op, experts)
    if (op.input_ids is None) != (op.tid2eid is None):
        raise op.error("tid2eid", got="one of input_ids and tid2eid", want="both or none")
    if op.input_ids is not None:
        _check_hash(op)


def _check_groups(op: Call, experts: int) -> None:
    groups = op.group_count
    if experts % groups:
        raise op.error("group_count", got=groups, want=f"a divisor of {experts} experts")
    size = experts // groups
    if op.k > size * op.k_group:
        raise op.error("k", got=op.k, want=f"<= {size * op.k_group}, the experts of k_group groups")
    if groups > 1 and size <= op.group_select_mode:
        raise op.error("group_count", got=groups, want="groups of two experts or more")
    aligned = -(-size // _LANES) * _LANES
    if aligned * groups > MAX_EXPERTS:
        raise op.error(
            "group_count",
            got=f"{groups} groups of {size}",
            want=f"at most {MAX_EXPERTS} with groups rounded up to {_LANES}",
            limit=True,
        )


def _check_hash(op: Call) -> None:
    """Check the table; 2-D input_ids pass here as upstream, but have no documented values."""
    op.expect_equal("input_ids", op.input_ids.shape[0], op.x.shape[0], "dim 0")
    if op.group_count != 1:
        raise op.error("group_count", got=op.group_count, want="1 with tid2eid")
    rank = len(op.tid2eid.shape)
    if rank != 2 or not any(size in (op.k, -1) for size in op.tid2eid.shape):
        raise op.error("tid2eid", got=op.tid2eid, want=f"[vocabulary, {op.k}]")


def _chosen(op: Call, scores: torch.Tensor) -> torch.Tensor:
    return top_indices(_selection_scores(op, scores), op.k)


def _selection_scores(op: Call, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores that are selected by: biased, -inf in groups that take no part."""
    if op.bias is not None:
        scores = scores + op.bias.to(torch.float32)
    if op.group_count == 1:
        return scores
    rows, experts = scores.shape
    groups = scores.view(rows, op.group_count, experts // op.group_count)
    if op.group_select_mode == LARGEST:
        group_scores = groups.amax(-1)
    else:
        two = groups.topk(2, dim=-1).values
        group_scores = two[..., 0] + two[..., 1]
    best = top_indices(group_scores, op.k_group)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).view(rows, experts)


def divides(op: Any) -> bool:
    """True where y is divided by its sum over the k chosen experts."""
    return bool(op.norm_type != SOFTMAX or op.renorm == 1)


def _weights(op: Call, chosen_scores: torch.Tensor) -> torch.Tensor:
    if divides(op):
        total = torch.zeros_like(chosen_scores[:, :1])
        for column in chosen_scores.split(1, dim=1):
            total = total + column
        chosen_scores = chosen_scores / (total + op.eps)
    return chosen_scores * op.routed_scaling_factor


def _hashed(op: Call) -> torch.Tensor | None:
    """Return the experts that the table gives, None without a table."""
    if op.tid2eid is None:
        return None
    ids = op.input_ids
    if ids.dim() != 1 or ids.shape[0] != op.x.shape[0] or op.tid2eid.shape[1] != op.k:
        raise op.error(
            "tid2eid",
            got=f"a table {list(op.tid2eid.shape)} and ids {list(ids.shape)}",
            want=f"[vocabulary, {op.k}] and [{op.x.shape[0]}]",
        )
    check_range(op, "input_ids", ids, 0, op.tid2eid.shape[0], "the rows of tid2eid")
    experts = op.tid2eid[ids]
    check_range(op, "tid2eid", experts, 0, op.x.shape[1], "the experts")
    return experts.to(torch.int64)


def _compute(op: Call) -> Tensors:
    rows, experts = op.x.shape
    hashed = _hashed(op)
    y = op.new_output((rows, op.k), op.x.dtype, op.x.device, 0)
    expert_idx = op.new_output((rows, op.k), torch.int32, op.x.device, 1)
    out = None
    if op.out_flag:
        out = op.new_output((rows, experts), torch.float32, op.x.device, 2)

    def work(chunk: slice) -> None:
        scores = normalise(op.x[chunk], op.norm_type)
        chosen = _chosen(op, scores) if hashed is None else hashed[chunk]
        y[chunk] = _weights(op, scores.gather(1, chosen))
        expert_idx[chunk] = chosen
        if out is not None:
            out[chunk] = scores

    run_parts(work, row_chunks(rows, experts))
    if out is None:
        out = poisoned((rows, experts), torch.float32, op.x.device)
    return [y, expert_idx, out]


def _naive(op: Call) -> Tensors:
    rows, experts = op.x.shape
    scores = normalise_in_chunks(op.x, op.norm_type)
    hashed = _hashed(op)
    y = torch.empty((rows, op.k), dtype=op.x.dtype)
    expert_idx = torch.empty((rows, op.k), dtype=torch.int32)
    for row in range(rows):
        if hashed is None:
            biased = scores[row] if op.bias is None else scores[row] + op.bias.float()
            chosen = _naive_choice(op, biased.tolist())
        else:
            chosen = hashed[row].tolist()
        total = torch.tensor(0.0)
        for expert in chosen:
            total = total + scores[row, expert]
        for place, expert in enumerate(chosen):
            weight = scores[row, expert]
            if divides(op):
                weight = weight / (total + op.eps)
            y[row, place] = weight * op.routed_scaling_factor
            expert_idx[row, place] = expert
    if not op.out_flag:
        scores = poisoned((rows, experts), torch.float32, op.x.device)
    return [y, expert_idx, scores]


def _naive_choice(op: Call, biased: list[float]) -> list[int]:
    size = len(biased) // op.group_count
    groups = [biased[at : at + size] for at in range(0, len(biased), size)]
    group_scores = []
    for group in groups:
        first = group[ranked(group)[0]]
        if op.group_select_mode == TWO_LARGEST and op.group_count > 1:
            second = group[ranked(group)[1]]
            first = float(torch.tensor(first) + torch.tensor(second))
        group_scores.append(first)
    kept = set(ranked(group_scores)[: op.k_group])
    masked = [
        score if op.group_count == 1 or expert // size in kept else float("-inf")
        for expert, score in enumerate(biased)
    ]
    return ranked(masked)[: op.k]


def _save(ctx: Any, op: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(op.x, outputs[1])
    ctx.norm_type = op.norm_type
    ctx.divides = divides(op)
    ctx.scaling, ctx.eps = op.routed_scaling_factor, op.eps
    ctx.out_flag = op.out_flag


def _backward(
    ctx: Any,
    grad_y: torch.Tensor,
    grad_ids: torch.Tensor | None,
    grad_out: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    x, expert_idx = ctx.saved_tensors
    scores = normalise(x, ctx.norm_type)
    grad = grad_y.to(torch.float32) * ctx.scaling
    if ctx.divides:
        chosen = scores.gather(-1, expert_idx.to(torch.int64))
        grad = divided_grad(grad, chosen, ctx.eps)
    grad = scatter_to_experts(x, expert_idx, grad)
    if ctx.out_flag and grad_out is not None:
        grad = grad + grad_out
    return {"x": normalise_grad(x, scores, grad, ctx.norm_type).to(x.dtype)}


_FLOATS = (torch.float16, torch.float32, torch.bfloat16)
_PAGE = "moe_gating_top_k/docs/aclnnMoeGatingTopK.md"

OPDEF = register(
    OpDef(
        ge_type="MoeGatingTopK",
        inputs=(
            Input("x", _FLOATS * 4),
            Input("bias", _FLOATS * 4, "optional"),
            Input(
                "input_ids",
                ((torch.int64,) * 3 + (torch.int32,) * 3) * 2,
                "optional",
            ),
            Input("tid2eid", (torch.int32,) * 6 + (torch.int64,) * 6, "optional"),
        ),
        outputs=(
            Output("y"),
            Output("expert_idx", dtype=torch.int32),
            Output("out", dtype=torch.float32),
        ),
        attrs=(
            Attr("k", "Int"),
            Attr("k_group", "Int", 1),
            Attr("group_count", "Int", 1),
            Attr("group_select_mode", "Int", 0),
            Attr("renorm", "Int", 0),
            Attr("norm_type", "Int", 0),
            Attr("out_flag", "Bool", False),
            Attr("routed_scaling_factor", "Float", 1.0),
            Attr("eps", "Float", 1e-20),
        ),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(Limit("x", "E", dim("x", 1), _PAGE, low=1, high=MAX_EXPERTS),),
        compute=_compute,
        naive=_naive,
        autograd=Autograd(_save, _backward),
        forms=(
            Form("softmax", {"x": "T E"}, {"k": 8, "renorm": 1}),
            Form(
                "sigmoid, bias, groups",
                {"x": "T E", "bias": "E"},
                {"k": 8, "norm_type": 1, "group_count": 8, "k_group": 4, "group_select_mode": 1},
            ),
        ),
        function="moe_gating_top_k",
        doc=f"ops-transformer moe/moe_gating_top_k: infershape, tiling; {_PAGE}",
    )
)
