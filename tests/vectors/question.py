"""One public case, in the terms of an OpDef."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from moe_graph.config import Soc
from moe_graph.ops import TensorSpec

Want = Literal["shapes", "accept", "reject", "values"]


@dataclass
class Question:
    """What a case asks and what it expects.

    Attributes:
        op: GE type.
        want: ``"shapes"``: infershape gives these; ``"accept"``, ``"reject"``: what the op does
            when it runs, or infershape when `only_infershape`; ``"values"``: the kernel and the
            reference compute these.
        inputs: per IR input a TensorSpec, a list of them or None (tensors for ``"values"``).
        attrs: attributes that the case gives, by IR name.
        soc: the product.
        outputs: specs that the case has allocated for the outputs, in IR order.
        shapes: for ``"shapes"``: per output, None where the case does not say.
        values: for ``"values"``: per output, None where the case does not say.
        only_leading: the values of an output may be fewer than its rows.
        only_infershape: the case is one of infershape, which knows no limits.
        part: it calls only the inference of shapes, or only that of dtypes.
    """

    op: str
    want: Want
    inputs: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    soc: Soc = Soc.A2
    outputs: list[TensorSpec | None] | None = None
    shapes: list[list[int] | None] = field(default_factory=list)
    values: list[torch.Tensor | None] = field(default_factory=list)
    only_leading: bool = False
    only_infershape: bool = False
    part: Literal["both", "shapes", "dtypes"] = "both"


class NotAsked(Exception):  # noqa: N818  an answer, not an error
    """A case cannot be put to an OpDef: the text says why, and it counts as not followed."""
