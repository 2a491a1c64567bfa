"""How Ascend 950 serves the ops of this family, which its graph engine does not have.

There the aclnn functions call other ops with other arguments:

| op                    | serving op               | arguments                                     |
|-----------------------|--------------------------|-----------------------------------------------|
| MoeTokenPermute       | MoeInitRoutingV2         | ``active_num`` = rows kept, 0 for all         |
| ... of int8 tokens    | MoeInitRoutingV3         | ``expert_num`` 10240, counts, no quantisation |
| MoeTokenPermuteGrad   | MoeInitRoutingV2Grad     | ``top_k`` = ``num_topk``                      |
| MoeTokenUnpermute     | MoeFinalizeRoutingV2     | ``drop_pad_mode`` 2, ``scales`` = ``probs``   |
| MoeTokenUnpermuteGrad | MoeFinalizeRoutingV2Grad | ``scales`` = ``probs``                        |

:func:`served_by` gives one row of this table as data. The eager kernels execute it with
:func:`compute`; graphs are decomposed by it (`moe_graph/converters/token_permute_950.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_graph.config import Soc
from moe_graph.ops.checks_once import specs_of
from moe_graph.ops.opdef import Call, Tensors
from moe_graph.ops.registry import find

INT8_EXPERTS = 10240
"""Expert ids of int8 tokens are below this: the largest ``expert_num`` of MoeInitRoutingV3."""

_COUNT = 1  # expert_tokens_num_type
_ROW_MAJOR = 2  # drop_pad_mode of MoeFinalizeRoutingV2


@dataclass(frozen=True)
class Source:
    """An input of the serving op.

    Attributes:
        name: the IR input of the served op that it is.
        as_column: ``[N]`` becomes ``[N, 1]``.
        dtype: cast to this first, None to leave it.
    """

    name: str
    as_column: bool = False
    dtype: torch.dtype | None = None

    def prepare(self, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the input of the served op as the serving op takes it, None for an absent one."""
        if value is None:
            return None
        if self.as_column:
            value = value.unsqueeze(1)
        return value if self.dtype is None else value.to(self.dtype)


@dataclass(frozen=True)
class Served:
    """A use of another op in place of one of this family.

    Attributes:
        ge_type: the serving op.
        inputs: its leading inputs, None for an absent one; those left out are absent.
        attrs: its attributes that are not the default.
        outputs: per output of the served op, the output of the serving op that it is, None for one
            that is not produced.
    """

    ge_type: str
    inputs: tuple[Source | None, ...]
    attrs: dict[str, Any]
    outputs: tuple[int | None, ...]


def served_by(ge_type: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Served:
    """Return what serves an op of this family on Ascend 950.

    Args:
        ge_type: the op of this family.
        inputs: per IR input a tensor or a spec (``.shape``, ``.dtype``), None for an absent one.
        attrs: every attribute.

    Raises:
        OpError: the serving op cannot do it, for example because an attribute of it would depend
            on a dynamic size.
    """
    opdef = find(ge_type)
    assert opdef is not None
    return _SERVED[ge_type](Call(opdef, inputs, attrs, Soc.ASCEND950))


def compute(op: Call, how: Literal["kernel", "reference"]) -> Tensors:
    """Compute the outputs of `op` with the kernel or the reference of the serving op.

    Raises:
        OpError: the serving op does not take the inputs.
    """
    served = _SERVED[op.opdef.ge_type](op)
    opdef = find(served.ge_type)
    assert opdef is not None
    inputs = [
        None if source is None else source.prepare(getattr(op, source.name))
        for source in served.inputs
    ]
    attrs = opdef.bind_attrs(served.attrs)
    opdef.infer(specs_of(inputs), attrs, op.soc)
    outputs = getattr(opdef, how)(inputs, attrs, op.soc)
    return [None if at is None else outputs[at] for at in served.outputs]


def _permute(op: Call) -> Served:
    if len(op.tokens.shape) != 2:
        raise op.error(
            "tokens", got=f"{len(op.tokens.shape)} dimensions", want="2 dimensions", limit=True
        )
    as_column = len(op.indices.shape) == 1
    tokens = Source("tokens")
    if op.tokens.dtype is not torch.int8:
        indices = Source("indices", as_column)
        return Served("MoeInitRoutingV2", (tokens, indices), {"active_num": _active(op)}, (0, 1))
    if op.num_out_tokens != 0:
        raise op.error(
            "num_out_tokens",
            got=op.num_out_tokens,
            want="0 in a graph with int8 tokens, since MoeInitRoutingV3 keeps every row",
            limit=True,
        )
    attrs = {
        "expert_num": INT8_EXPERTS,
        "expert_tokens_num_flag": True,
        "expert_tokens_num_type": _COUNT,
    }
    return Served(
        "MoeInitRoutingV3", (tokens, Source("indices", as_column, torch.int32)), attrs, (0, 1)
    )


def _active(op: Call) -> int:
    """Return ``active_num``: how many rows are kept, 0 for all."""
    if op.num_out_tokens >= 0:
        return int(op.num_out_tokens)
    copies = 1
    for size in op.indices.shape:
        if not isinstance(size, int) or size < 0:
            raise op.error(
                "num_out_tokens",
                got=op.num_out_tokens,
                want="0 or more where the number of indices is dynamic, since active_num is an "
                "attribute",
                limit=True,
            )
        copies *= size
    kept = copies + op.num_out_tokens
    if kept <= 0:
        raise op.error(
            "num_out_tokens", got=op.num_out_tokens, want=f"> -{copies}, so that rows are left"
        )
    return int(kept)


def _permute_grad(op: Call) -> Served:
    inputs = (Source("permuted_output_grad"), Source("sorted_indices"))
    return Served("MoeInitRoutingV2Grad", inputs, {"top_k": op.num_topk}, (0,))


def _unpermute(op: Call) -> Served:
    inputs = (Source("permuted_tokens"), Source("sorted_indices"), None, None, None)
    scales = None if op.probs is None else Source("probs")
    return Served("MoeFinalizeRoutingV2", (*inputs, scales), {"drop_pad_mode": _ROW_MAJOR}, (0,))


def _unpermute_grad(op: Call) -> Served:
    inputs = (Source("unpermuted_tokens_grad"), Source("sorted_indices"))
    if op.probs is None:
        return Served("MoeFinalizeRoutingV2Grad", inputs, {}, (0, None))
    scaled = (*inputs, Source("permuted_tokens"), Source("probs"))
    return Served("MoeFinalizeRoutingV2Grad", scaled, {}, (0, 1))


_SERVED: dict[str, Callable[[Call], Served]] = {
    "MoeTokenPermute": _permute,
    "MoeTokenPermuteGrad": _permute_grad,
    "MoeTokenUnpermute": _unpermute,
    "MoeTokenUnpermuteGrad": _unpermute_grad,
}

SERVED_TYPES = tuple(_SERVED)
"""The GE types that others serve on Ascend 950."""
