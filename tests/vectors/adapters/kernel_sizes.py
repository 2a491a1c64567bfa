"""Command lines that the unit tests of kernels make their data with: sizes, dtypes, attributes.

A kernel runs on these sizes, so its op takes them. What the scripts mean by their arguments:

    moe_finalize_routing(_v2)     experts, H, K, T, dtype ("bf16fp32": scales alone float32), x2
    moe_init_routing              T, K, H, active_num, dtype; quantised: scale, offset before dtype
    moe_init_routing_quant_v2     T, K, H, active_num, C, E, drop_pad, cumsum, before capacity, mode
    moe_init_routing_v2_grad      T, K, H, E, C, drop_pad, active_num, dtype
    moe_init_routing_v3           T, H, K, E of the ids, dtype, mode, active_num, C, E, drop_pad,
                                  counts type, counts flag, range, row_idx_type
    moe_token_permute_with_ep_grad   T, K, H, dtype, probs
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable
from typing import Any

import torch

from moe_graph.ops import TensorSpec
from tests.vectors.question import NotAsked, Question
from tests.vectors.reading import dtype_of

Words = list[str]


def _spec(*shape: int, dtype: torch.dtype = torch.int32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _finalize(ge_type: str) -> Callable[[Words], Question]:
    def read(words: Words) -> Question:
        experts, hidden, top_k, tokens = map(int, words[:4])
        mixed = words[4] == "bf16fp32"
        dtype = torch.bfloat16 if mixed else dtype_of(words[4])
        rows = _spec(tokens * top_k, hidden, dtype=dtype)
        token = _spec(tokens, hidden, dtype=dtype)
        x2 = token if words[5] == "true" else None
        bias = _spec(experts, hidden, dtype=dtype)
        scales = _spec(tokens, top_k, dtype=torch.float32 if mixed else dtype)
        row_idx, expert_idx = _spec(tokens * top_k), _spec(tokens, top_k)
        if ge_type == "MoeFinalizeRouting":
            inputs = [rows, token, x2, bias, scales, row_idx, expert_idx]
        else:
            inputs = [rows, row_idx, token, x2, bias, scales, expert_idx]
        return Question(ge_type, "accept", inputs)

    return read


def _init_v1(words: Words) -> Question:
    tokens, top_k, hidden, active_num = map(int, words[:4])
    x = _spec(tokens, hidden, dtype=dtype_of(words[-1]))
    indices = [_spec(tokens, top_k), _spec(tokens, top_k)]
    if len(words) == 5:
        return Question("MoeInitRouting", "accept", [x, *indices], {"active_num": active_num})
    attrs = {"active_num": active_num, "scale": float(words[4]), "offset": float(words[5])}
    return Question("MoeInitRoutingQuant", "accept", [x, *indices], attrs)


def _init_quant_v2(words: Words) -> Question:
    tokens, top_k, hidden, active_num, capacity, experts, drop_pad, cumsum = map(int, words[:8])
    static = words[9] == "0"
    one = _spec(1, dtype=torch.float32) if static else _spec(1, hidden, dtype=torch.float32)
    inputs = [
        _spec(tokens, hidden, dtype=dtype_of(words[10])),
        _spec(tokens, top_k),
        one,
        one if static else None,
    ]
    attrs = {
        "active_num": active_num,
        "expert_capacity": capacity,
        "expert_num": experts,
        "drop_pad_mode": drop_pad,
        "expert_tokens_count_or_cumsum_flag": cumsum,
        "expert_tokens_before_capacity_flag": words[8] == "true",
        "quant_mode": int(words[9]),
    }
    return Question("MoeInitRoutingQuantV2", "accept", inputs, attrs)


def _init_v2_grad(words: Words) -> Question:
    tokens, top_k, hidden, experts, capacity, drop_pad, active_num = map(int, words[:7])
    dtype = dtype_of(words[7])
    rows = _spec(active_num or tokens * top_k, hidden, dtype=dtype)
    if drop_pad:
        rows = _spec(experts, capacity, hidden, dtype=dtype)
    attrs = {"top_k": top_k, "drop_pad_mode": drop_pad, "active_num": active_num}
    return Question("MoeInitRoutingV2Grad", "accept", [rows, _spec(tokens * top_k)], attrs)


def _init_v3(words: Words) -> Question:
    tokens, hidden, top_k, _ = map(int, words[:4])
    mode = int(words[5])
    x, scale, offset = _spec(tokens, hidden, dtype=dtype_of(words[4])), None, None
    if mode == -1:
        scale = _spec(tokens, dtype=torch.float32)
    elif mode == 0:
        scale = offset = _spec(1, dtype=torch.float32)
    attrs = {
        "active_num": int(words[6]),
        "expert_capacity": int(words[7]),
        "expert_num": int(words[8]),
        "drop_pad_mode": int(words[9]),
        "expert_tokens_num_type": int(words[10]),
        "expert_tokens_num_flag": words[11] == "1",
        "quant_mode": mode,
        "active_expert_range": ast.literal_eval(words[12]),
        "row_idx_type": int(words[13]),
    }
    return Question("MoeInitRoutingV3", "accept", [x, _spec(tokens, top_k), scale, offset], attrs)


def _permute_with_ep_grad(words: Words) -> Question:
    tokens, top_k, hidden = map(int, words[:3])
    dtype, rows = dtype_of(words[3].removesuffix("_t")), tokens * top_k
    probs = _spec(rows, dtype=dtype) if words[4] == "True" else None
    return Question(
        "MoeTokenPermuteWithEpGrad",
        "accept",
        [_spec(rows, hidden, dtype=dtype), _spec(rows), probs],
        {"num_topk": top_k, "range": [0, rows]},
    )


_READERS: dict[str, Callable[[Words], Question]] = {
    "moe_finalize_routing": _finalize("MoeFinalizeRouting"),
    "moe_finalize_routing_v2": _finalize("MoeFinalizeRoutingV2"),
    "moe_init_routing": _init_v1,
    "moe_init_routing_quant": _init_v1,
    "moe_init_routing_quant_v2": _init_quant_v2,
    "moe_init_routing_v2_grad": _init_v2_grad,
    "moe_init_routing_v3": _init_v3,
    "moe_token_permute_with_ep_grad": _permute_with_ep_grad,
}


def _question(case: dict[str, Any]) -> Question:
    script, *words = shlex.split(case["cmd_args"])
    if script != "gen_data.py":
        raise NotAsked("a command that makes no data: it names a tiling, or sets permissions")
    return _READERS[case["source_path"].split("/")[1]](words)


ADAPTERS: dict[str, Callable[[Any], Question]] = {"kernel_ut_params": _question}
