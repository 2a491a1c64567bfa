"""GE lowering of 16-bit attention; ``attention.py`` says why there are two ways.

npu_fusion_attention_v3(q, k, v, N, "BNSD", atten_mask=m, scale=s)
    ->  FlashAttentionScore(q, k, v, atten_mask=m) {head_num N, input_layout BNSD, scale_value s}
npu_fusion_attention_grad_v3(q, k, v, dy, N, "BNSD", softmax_max=..., ...)
    ->  FlashAttentionScoreGrad(q, k, v, dy, ..., softmax_max, softmax_sum, attention_in)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moe_graph.converters.attention import attention, attention_grad, refuse_unsupported

npu = torch.ops.npu


def register_attention() -> None:
    """Register the two converters with TorchAir."""
    import torchair

    torchair.register_fx_node_ge_converter(npu.npu_fusion_attention_v3.default)(_convert)
    torchair.register_fx_node_ge_converter(npu.npu_fusion_attention_grad_v3.default)(_convert_grad)


def _convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
    call = _bind("npu_fusion_attention_v3", attention, args, kwargs)
    inputs = {
        "query": call["query"],
        "key": call["key"],
        "value": call["value"],
        **dict.fromkeys(("real_shift", "drop_mask", "padding_mask")),
        "atten_mask": call["atten_mask"],
        **dict.fromkeys(
            ("prefix", "actual_seq_qlen", "actual_seq_kvlen", "q_start_idx", "kv_start_idx")
        ),
    }
    row_max, row_sum, _, out = _node(
        "FlashAttentionScore",
        inputs,
        ["softmax_max", "softmax_sum", "softmax_out", "attention_out"],
        call,
        scale=call["scale"],
    )
    return out, row_max, row_sum, *(_unused(spec) for spec in meta_outputs[3:])


def _convert_grad(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
    call = _bind("npu_fusion_attention_grad_v3", attention_grad, args, kwargs)
    inputs = {
        "query": call["query"],
        "key": call["key"],
        "value": call["value"],
        "dy": call["dy"],
        **dict.fromkeys(("pse_shift", "drop_mask", "padding_mask")),
        "atten_mask": call["atten_mask"],
        "softmax_max": call["softmax_max"],
        "softmax_sum": call["softmax_sum"],
        "softmax_in": None,
        "attention_in": call["attention_in"],
        **dict.fromkeys(
            ("prefix", "actual_seq_qlen", "actual_seq_kvlen", "q_start_idx", "kv_start_idx")
        ),
    }
    grads = _node(
        "FlashAttentionScoreGrad",
        inputs,
        ["dq", "dk", "dv", "dpse"],
        call,
        scale=call["scale_value"],
    )
    return *grads[:3], *(_unused(spec) for spec in meta_outputs[3:])


def _bind(
    op: str, definition: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name, defaults filled in, after checking that they are supported."""
    bound = inspect.signature(definition).bind(*args, **kwargs)
    bound.apply_defaults()
    refuse_unsupported(op, bound.arguments)
    return bound.arguments


def _node(
    op_type: str, inputs: dict[str, Any], outputs: list[str], call: dict[str, Any], *, scale: float
) -> Any:
    from torchair import ge

    attrs = {
        "head_num": ge.attr.Int(call["head_num"]),
        "input_layout": ge.attr.Str(call["input_layout"]),
        "scale_value": ge.attr.Float(scale),
        "keep_prob": ge.attr.Float(call["keep_prob"]),
        "pre_tockens": ge.attr.Int(call["pre_tockens"]),
        "next_tockens": ge.attr.Int(call["next_tockens"]),
        "inner_precise": ge.attr.Int(call["inner_precise"]),
        "sparse_mode": ge.attr.Int(call["sparse_mode"]),
    }
    return ge.custom_op(op_type, inputs=inputs, outputs=outputs, attrs=attrs)


def _unused(spec: Any) -> Any:
    """Return a constant in place of an output that holds nothing without dropout."""
    from torchair import ge

    return ge.Const(np.zeros(spec.size).tolist(), dtype=spec.dtype)
