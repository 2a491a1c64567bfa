"""``npu_fusion_attention`` and its gradient, which torch_npu puts in the place of SDPA.

``F.scaled_dot_product_attention`` on NPU tensors calls ``npu_fusion_attention_v3``; autograd calls
``npu_fusion_attention_grad_v3``. Versions 1 and 3 differ in how the dropout seed is returned.
Arithmetic is fp32, rounded once at the end. A mask element that is True *drops* its position, and a
row with every position dropped gives zeros.

Source of the semantics: the torch_npu API reference for ``npu_fusion_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_graph.emulator.eager_random import cpu_generator

_STATISTICS_WIDTH = 8  # softmax_max and softmax_sum repeat each number this often


class AttentionError(NotImplementedError):
    """An argument of ``npu_fusion_attention`` that the emulated kernel does not take."""


def _to_bnsd(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """Bring a tensor of `layout` to ``[batch, heads, sequence, head size]``."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return tensor.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    raise AttentionError(
        f"npu_fusion_attention, argument input_layout: got {layout!r}, want one of 'BNSD', 'BSND', "
        "'BSH', 'SBH', 'TND'"
    )


def _from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Undo :func:`_to_bnsd`; the result is contiguous."""
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2)
    return tensor.contiguous()


def _heads_of(tensor: torch.Tensor, layout: str, query: torch.Tensor, heads: int) -> int:
    """Number of heads of a key or value, which may be fewer than the query's."""
    if layout == "BNSD":
        return tensor.shape[1]
    if layout == "BSND":
        return tensor.shape[2]
    return tensor.shape[-1] * heads // query.shape[-1]


def _dropped(arguments: dict[str, Any], rows: int, columns: int) -> torch.Tensor | None:
    """The positions that take no part, broadcastable to ``[batch, heads, rows, columns]``."""
    mode = arguments["sparse_mode"]
    mask: torch.Tensor | None = arguments["atten_mask"]
    # Distance from the diagonal, which starts at the top left (modes 0, 2) or ends at the bottom
    # right (modes 3, 4).
    shift = columns - rows if mode in (3, 4) else 0
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - shift
    if mode in (2, 3):
        return distance > 0
    before = arguments["pre_tockens"]
    after = arguments["next_tockens"]
    if mode == 4:
        return (distance > after) | (-distance > before)
    if mode not in (0, 1):
        raise AttentionError(
            f"npu_fusion_attention, argument sparse_mode: got {mode}, want 0 to 4 on the emulated "
            "NPU"
        )
    if mask is None:
        return None
    mask = mask.bool()
    if mode == 0 and (after < columns or before < rows):
        mask = mask | (distance > after) | (-distance > before)
    return mask


@dataclass
class _Attention:
    """One call in ``[batch, kv heads, group, sequence, size]`` form, in fp32."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    probabilities: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    keep: torch.Tensor | None

    def dropped_out(self) -> torch.Tensor:
        """Probabilities after dropout."""
        return self.probabilities if self.keep is None else self.probabilities * self.keep


def _segments(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Cut a call in ``TND`` layout, whose sequences lie end to end, into one ``BSND`` call each."""
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if arguments[name] is None:
            raise AttentionError(
                f"npu_fusion_attention, argument {name}: got None, want the end of each sequence "
                "with input_layout 'TND'"
            )
    rows = [int(end) for end in arguments["actual_seq_qlen"]]
    columns = [int(end) for end in arguments["actual_seq_kvlen"]]
    ends = {"query": rows, "dy": rows, "key": columns, "value": columns}
    common = {"input_layout": "BSND", "actual_seq_qlen": None, "actual_seq_kvlen": None}
    for i in range(len(rows)):
        parts = {
            name: arguments[name][of[i - 1] if i else 0 : of[i]].unsqueeze(0)
            for name, of in ends.items()
            if name in arguments
        }
        yield arguments | common | parts | {"seed": arguments["seed"] + i}


def _refuse(arguments: dict[str, Any]) -> None:
    wanted_absent = (
        "padding_mask",
        "sink",
        "dropout_mask",
        "prefix",
        "actual_seq_qlen",
        "actual_seq_kvlen",
    )
    for name in wanted_absent:
        if arguments.get(name) is not None:
            raise AttentionError(
                f"npu_fusion_attention, argument {name}: got a value, want None on the emulated NPU"
            )


def _attend(arguments: dict[str, Any], seed: int) -> _Attention:
    """Compute the probabilities of one call."""
    _refuse(arguments)
    layout, heads = arguments["input_layout"], arguments["head_num"]
    query = arguments["query"]
    kv_heads = _heads_of(arguments["key"], layout, query, heads)
    scale = arguments["scale"] if "scale" in arguments else arguments["scale_value"]
    q = _to_bnsd(query, layout, heads).float().unflatten(1, (kv_heads, -1))
    k = _to_bnsd(arguments["key"], layout, kv_heads).float().unsqueeze(2)
    v = _to_bnsd(arguments["value"], layout, kv_heads).float().unsqueeze(2)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    by_head = scores.flatten(1, 2)
    if arguments["pse"] is not None:
        by_head += arguments["pse"].float()
    dropped = _dropped(arguments, *by_head.shape[-2:])
    if dropped is not None:
        by_head.masked_fill_(dropped, float("-inf"))
    maximum = by_head.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = (by_head - maximum).exp_()
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / total.masked_fill(total == 0, 1.0)
    keep_prob = arguments["keep_prob"]
    keep = None
    if keep_prob < 1.0:
        generator = torch.Generator().manual_seed(seed)
        keep = torch.rand(scores.shape, generator=generator).lt(keep_prob).float() / keep_prob
    return _Attention(q, k, v, probabilities.view_as(scores), maximum, total, keep)


def _forward(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the attention and the two softmax statistics."""
    if arguments["input_layout"] == "TND":
        outs, *statistics = zip(*map(_forward, _segments(arguments)), strict=True)
        by_token = [torch.cat([s[0].transpose(0, 1) for s in parts]) for parts in statistics]
        return (torch.cat(outs, 1).squeeze(0), *by_token)
    attention = _attend(arguments, arguments["seed"])
    out = torch.matmul(attention.dropped_out(), attention.value).flatten(1, 2)
    width = (*attention.maximum.shape[:-1], _STATISTICS_WIDTH)
    return (
        _from_bnsd(out, arguments["input_layout"]).to(arguments["query"].dtype),
        attention.maximum.expand(width).contiguous(),
        attention.total.expand(width).contiguous(),
    )


def _backward(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key, value, pse (empty without pse) and sink (empty)."""
    if arguments["input_layout"] == "TND":
        *grads, _, _ = zip(*map(_backward, _segments(arguments)), strict=True)
        joined = [torch.cat(parts, 1).squeeze(0) for parts in grads]
        return (*joined, torch.empty(0), torch.empty(0))
    attention = _attend(arguments, arguments["seed"])
    layout, heads = arguments["input_layout"], arguments["head_num"]
    dy = _to_bnsd(arguments["dy"], layout, heads).float().unflatten(1, attention.query.shape[1:3])
    d_dropped = torch.matmul(dy, attention.value.transpose(-1, -2))
    d_probabilities = d_dropped if attention.keep is None else d_dropped * attention.keep
    p = attention.probabilities
    d_scores = p * (d_probabilities - (d_probabilities * p).sum(-1, keepdim=True))
    d_value = torch.matmul(attention.dropped_out().transpose(-1, -2), dy).sum(2)
    d_query = torch.matmul(d_scores, attention.key) * arguments["scale_value"]
    d_key = torch.matmul(d_scores.transpose(-1, -2), attention.query).sum(2)
    d_key = d_key * arguments["scale_value"]
    pse = arguments["pse"]
    empty = torch.empty(0)
    return (
        _from_bnsd(d_query.flatten(1, 2), layout).to(arguments["query"].dtype),
        _from_bnsd(d_key, layout).to(arguments["key"].dtype),
        _from_bnsd(d_value, layout).to(arguments["value"].dtype),
        empty if pse is None else d_scores.flatten(1, 2).sum_to_size(pse.shape).to(pse.dtype),
        empty,
    )


def _bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of the ``npu`` operator `name` by its name, defaults filled in."""
    schema = getattr(torch.ops.npu, name).default._schema
    bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in schema.arguments), args, strict=False))
    return bound | kwargs


def _draw_seed(arguments: dict[str, Any]) -> int:
    """Seed of this call's dropout; 0, and the generator untouched, without dropout."""
    return cpu_generator(None, None).initial_seed() if arguments["keep_prob"] < 1.0 else 0


def fusion_attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """``npu::npu_fusion_attention``: attention, softmax max, sum, unused, seed, unused (2)."""
    arguments = _bind("npu_fusion_attention", args, kwargs)
    arguments["seed"] = _draw_seed(arguments)
    return (*_forward(arguments), torch.empty(0), arguments["seed"], 0, 0)


def fusion_attention_v3(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """``npu::npu_fusion_attention_v3``: attention, softmax max, sum, (unused), seed, offset."""
    arguments = _bind("npu_fusion_attention_v3", args, kwargs)
    arguments["seed"] = _draw_seed(arguments)
    seed = torch.tensor([arguments["seed"]], dtype=torch.int64)
    return (*_forward(arguments), torch.empty(0), seed, torch.zeros_like(seed))


def fusion_attention_grad(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """``npu::npu_fusion_attention_grad``: gradients of query, key, value, pse, sink."""
    return _backward(_bind("npu_fusion_attention_grad", args, kwargs))


def fusion_attention_grad_v3(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """``npu::npu_fusion_attention_grad_v3``: gradients of query, key, value, pse, sink."""
    arguments = _bind("npu_fusion_attention_grad_v3", args, kwargs)
    seed = arguments["seed"]
    arguments["seed"] = 0 if seed is None else int(seed)
    return _backward(arguments)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_fusion_attention": fusion_attention,
    "npu::npu_fusion_attention_v3": fusion_attention_v3,
    "npu::npu_fusion_attention_grad": fusion_attention_grad,
    "npu::npu_fusion_attention_grad_v3": fusion_attention_grad_v3,
}
"""Functions on CPU tensors, by the name of the operator that they are the device's kernel of."""
