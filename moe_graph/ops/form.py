"""A use of an op, with names for its dimensions, whose shape rule the documentation prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shapes = Mapping[str, "str | tuple[str, ...]"]


@dataclass(frozen=True)
class Form:
    """One use of an op.

    Attributes:
        name: for example ``"drop/pad"``.
        shapes: per input, its dimensions as sympy expressions separated by spaces:
            ``{"x": "T H", "expert_idx": "T K"}``; a tuple of such for a dynamic input. Inputs left
            out are absent.
        attrs: attributes that are not the default; a string for an Int attribute is a symbol, as
            in ``{"expert_num": "E"}``. Symbols are positive.
    """

    name: str
    shapes: Shapes
    attrs: Mapping[str, Any] = field(default_factory=dict)
