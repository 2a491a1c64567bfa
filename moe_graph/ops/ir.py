"""The parts of an IR: inputs, outputs, attributes, and the spec of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import UNKNOWN_RANK, Dim
from moe_graph.ops.errors import OpError

InputKind = Literal["required", "optional", "dynamic"]
AttrType = Literal["Int", "Bool", "Float", "Str", "ListInt"]

REQUIRED: Final = object()
"""Default of an attribute that has none."""

_PYTHON_TYPES: Final[dict[AttrType, type]] = {
    "Int": int,
    "Bool": bool,
    "Float": float,
    "Str": str,
    "ListInt": tuple,
}
_GE_VALUE_TYPES: Final[dict[AttrType, str]] = {
    "Int": "VT_INT",
    "Bool": "VT_BOOL",
    "Float": "VT_FLOAT",
    "Str": "VT_STRING",
    "ListInt": "VT_LIST_INT",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; ``shape == (-2,)`` is an unknown rank.

    Attributes:
        shape: dimensions.
        dtype: element type.
        bounds: indices of the dimensions that are upper bounds: how much of them is written depends
            on the data. The others are exact.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    bounds: tuple[int, ...] = field(default=(), compare=False)

    @property
    def rank_known(self) -> bool:
        """False for a tensor of unknown rank."""
        return not (
            len(self.shape) == 1
            and isinstance(self.shape[0], int)
            and self.shape[0] == UNKNOWN_RANK[0]
        )

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a real or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{show_shape(self.shape)}"


def show_shape(shape: Sequence[Dim]) -> str:
    """Return a shape as users write it: ``[8, s0, 4]``."""
    return "[" + ", ".join(str(dim) for dim in shape) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Input:
    """An input of the IR.

    Attributes:
        name: IR name.
        dtypes: one entry for each supported combination of dtypes ("column"), aligned over the
            inputs of an op; a single entry stands for every column.
        kind: ``"dynamic"`` is a list of tensors.
        dtypes_950: the columns on Ascend 950, where they differ.
        products: the products whose IR has this (optional) input, None for all.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    kind: InputKind = "required"
    dtypes_950: tuple[torch.dtype, ...] | None = None
    products: tuple[Soc, ...] | None = None

    def exists_on(self, soc: Soc) -> bool:
        """Tell whether the IR of `soc` has this input."""
        return self.products is None or soc in self.products

    def columns(self, soc: Soc) -> tuple[torch.dtype, ...]:
        """Return the columns of this input on `soc`."""
        if soc is Soc.ASCEND950 and self.dtypes_950 is not None:
            return self.dtypes_950
        return self.dtypes


@dataclass(frozen=True)
class Output:
    """An output of the IR.

    Attributes:
        name: IR name.
        required: False when some attributes make the op leave it out.
        dtype: dtype of the output, None when it follows an input.
        dynamic: a list of tensors; only the last output may be one.
    """

    name: str
    required: bool = True
    dtype: torch.dtype | None = None
    dynamic: bool = False


@dataclass(frozen=True)
class Attr:
    """An attribute of the IR; `default` is :data:`REQUIRED` when it has none."""

    name: str
    type: AttrType
    default: Any = REQUIRED

    @property
    def python_type(self) -> Any:
        """Python type of a value; a list is held as a tuple."""
        return _PYTHON_TYPES[self.type]

    @property
    def ge_value_type(self) -> str:
        """GE's name of the value type, for example ``"VT_LIST_INT"``."""
        return _GE_VALUE_TYPES[self.type]

    def missing(self, ge_type: str) -> OpError:
        """Return the error for an op that is not given this attribute."""
        return OpError(ge_type, self.name, got="nothing", want=f"{self.type} value")
