"""MoeTokenPermuteGrad: gradient of the tokens of MoeTokenPermute.

``input_grad[i] = sum over k of permuted_output_grad[sorted_indices[i * num_topk + k]]`` in fp32, k
ascending, rounded once. On Ascend 950 MoeInitRoutingV2Grad computes it, in its own order.

GE's infershape gives ``permuted rows // num_topk`` tokens, so the op is for gradients that have a
row for every index; where ``num_out_tokens`` left rows out, `gradient_of_tokens.py` says which op
to use.
"""

from __future__ import annotations

import torch

from moe_graph.config import Soc
from moe_graph.ops.defs.support.checks import check_range
from moe_graph.ops.defs.token_permute import on_950
from moe_graph.ops.defs.token_permute.dtypes import FLOATS
from moe_graph.ops.defs.token_permute.sorting import (
    check_whole_tokens,
    refuse_padded_mode,
    size,
    top_k_limit,
)
from moe_graph.ops.defs.token_permute.sums import Sum
from moe_graph.ops.dims import floordiv, may_equal
from moe_graph.ops.opdef import (
    REQUIRED,
    Attr,
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


def _shapes(op: Call) -> Specs:
    op.expect_at_least("num_topk", 1)
    rows, hidden = (size(op, "permuted_output_grad", at) for at in range(2))
    return [TensorSpec((floordiv(rows, op.num_topk), hidden), op.permuted_output_grad.dtype)]


def _tiling(op: Call) -> None:
    refuse_padded_mode(op)
    rows, _ = op.dims("permuted_output_grad", rank=2)
    (copies,) = op.dims("sorted_indices", rank=1)
    if not may_equal(rows, copies):
        raise op.error(
            "permuted_output_grad",
            got=f"{rows} rows for {copies} indices",
            want="a row for every index",
            hint="MoeTokenUnpermute with probs of 1 adds up the rows where some were left out",
        )
    check_whole_tokens(op, copies)


def _sum(op: Call) -> Sum:
    rows = op.permuted_output_grad
    check_range(op, "sorted_indices", op.sorted_indices, 0, rows.shape[0], "the rows")
    tokens = rows.shape[0] // op.num_topk
    return Sum(rows, op.sorted_indices, tokens, op.num_topk, None, (0, rows.shape[0]))


def _compute(op: Call) -> Tensors:
    if op.soc is Soc.ASCEND950:
        return on_950.compute(op, "kernel")
    return [_sum(op).compute(op)]


def _naive(op: Call) -> Tensors:
    if op.soc is Soc.ASCEND950:
        return on_950.compute(op, "reference")
    return [_sum(op).naive()]


OPDEF = register(
    OpDef(
        ge_type="MoeTokenPermuteGrad",
        inputs=(Input("permuted_output_grad", FLOATS), Input("sorted_indices", (torch.int32,))),
        outputs=(Output("input_grad"),),
        attrs=(Attr("num_topk", "Int", REQUIRED), Attr("padded_mode", "Bool", False)),
        shape_rule=_shapes,
        tiling_rule=_tiling,
        limits=(
            top_k_limit(
                "num_topk", "moe_token_permute_grad/docs/aclnnMoeTokenPermuteGrad.md, constraints"
            ),
        ),
        checked_outputs=("input_grad",),
        compute=_compute,
        naive=_naive,
        no_gradient="it is a gradient itself",
        forms=(
            Form(
                "all rows",
                {"permuted_output_grad": "T*K H", "sorted_indices": "T*K"},
                {"num_topk": "K"},
            ),
        ),
        ge_products=(Soc.A2, Soc.A3),
        function="moe_token_permute_grad",
        doc="ops-transformer moe/moe_token_permute_grad: infershape, tiling, kernel",
    )
)
