"""How a router makes scores of its logits, and the bias that it selects with.

::

    scores = logits.softmax(-1, dtype=torch.float32)     Scores(softmax, logits)
    scores = logits.float().sigmoid()                    Scores(sigmoid, logits)
    choice = scores + correction_bias                    Ranking(scores, bias)
    choice = logits                                      Ranking of the logits themselves

The ops take the scores in fp32 whatever the dtype of the logits, so that scores of a source which
rounds them to 16 bits are not the op's scores: two experts may tie there and not in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_graph.ops.defs.gating.norms import SIGMOID, SOFTMAX, SQRT_SOFTPLUS
from moe_graph.passes import meta
from moe_graph.passes.canonical import Call
from moe_graph.passes.facts import Root
from moe_graph.passes.misses import Miss
from moe_graph.passes.router_values import Values, argument, is_last_dim

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNROUNDED = ("add", "cast", "detach", "div", "mul", "neg", "reshape", "sub")
"""Ops with one tensor that make equal numbers of equal ones."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores ``[..., E]`` in fp32.

    Attributes:
        call: what made them.
        norm: how, as MoeGatingTopK numbers it; None for the logits themselves, in their dtype.
        logits: what they are made of.
        reader: node that reads `logits`.
    """

    call: Call
    norm: int | None
    logits: Node
    reader: Node


@dataclass(frozen=True, eq=False)
class Ranking:
    """What decides which experts are chosen, before groups.

    Attributes:
        call: what made it.
        scores: the scores in it.
        bias: one value per expert that is added to the scores, or None.
    """

    call: Call
    scores: Scores
    bias: Node | None = None


def read_ranking(values: Values, call: Call, root: Root) -> Ranking | Miss | None:
    """Return the ranking that `call` computes of scores, None if it computes none of scores."""
    scores = _activation(values, call, root)
    if scores is not None:
        return scores if isinstance(scores, Miss) else Ranking(call, scores)
    return _biased(values, call, root)


def rounded_logits(values: Values, scores: Scores) -> Node | None:
    """Return the tensor of 16 bits that the logits are, up to casts and numbers, or None."""
    node, reader = scores.logits, scores.reader
    while meta.dtype(node) is torch.float32:
        made = values.made(node, reader)
        if made is None or made.op not in _UNROUNDED or made.writes is not None:
            return None
        operands = [made.get("input"), made.get("other")]
        tensors = [operand for operand in operands if meta.is_tensor(operand)]
        if len(tensors) != 1 or not isinstance(tensors[0], Node):
            return None
        node, reader = tensors[0], made.node
    return node


def _biased(values: Values, call: Call, root: Root) -> Ranking | Miss | None:
    if call.op != "add" or call.get("alpha") not in (1, None):
        return None
    for scored, added in (("input", "other"), ("other", "input")):
        activation = values.operand(call, scored, detached=True)
        scores = _activation(values, activation, root) if activation is not None else None
        if isinstance(scores, Miss):
            return scores
        bias = call[added]
        if scores is None or not meta.is_tensor(bias):
            continue
        dims, experts = meta.shape(bias), meta.shape(call.node)[-1]
        is_vector = bool(dims) and all(meta.same_dim(dim, 1) for dim in dims[:-1])
        if is_vector and meta.same_dim(dims[-1], experts) and meta.dtype(bias) in FLOATS:
            return Ranking(call, scores, bias)
    return None


def _activation(values: Values, call: Call, root: Root) -> Scores | Miss | None:
    """Return scores if `call` makes them of logits, None if it is no such thing."""
    if call.op == "softmax":
        dim = call["dim"] if isinstance(call["dim"], int) else None
        norm, logits, reader = SOFTMAX, call["input"], call.node
        if not is_last_dim(dim, call.node):
            return None
    elif call.op == "sigmoid":
        norm, logits, reader = SIGMOID, call["input"], call.node
    else:
        softplus = _under_root(values, call)
        if softplus is None:
            return None
        norm, logits, reader = SQRT_SOFTPLUS, softplus["input"], softplus.node
    if call.writes is not None or not meta.is_tensor(logits):
        return None
    if meta.dtype(call.node) is not torch.float32 or meta.dtype(logits) not in FLOATS:
        return Miss(
            "router-dtype",
            call.node,
            root,
            lambda: f"{call.op} of {meta.dtype(logits)} in {meta.dtype(call.node)}",
            "scores in float32, which is what MoeGatingTopKSoftmax and MoeGatingTopK select by",
            "take the scores of logits.float(), or softmax(..., dtype=torch.float32)",
        )
    return Scores(call, norm, logits, reader)


def _under_root(values: Values, call: Call) -> Call | None:
    """Return the softplus whose square root `call` is."""
    is_root = call.op == "sqrt" or (call.op == "pow" and argument(call, "exponent", 1) == 0.5)
    inner = values.operand(call, "input") if is_root else None
    plain = inner is not None and inner.op == "softplus" and set(inner.args) == {"input"}
    return inner if plain else None
