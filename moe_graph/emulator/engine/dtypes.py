"""The dtype numberings of GE and their torch counterparts.

GE numbers its dtypes twice. Tensor descriptors of a serialised graph use the enum of the protobuf
file; attributes (``Cast.dst_type``, ``Shape.dtype``) and the C++ API use ``ge::DataType``. Nothing
outside this file mentions a number.
"""

from __future__ import annotations

import torch

_TABLE: tuple[tuple[str, int, int, torch.dtype], ...] = (
    # name, number in ge_ir.proto, ge::DataType, torch
    ("DT_FLOAT", 1, 0, torch.float32),
    ("DT_FLOAT16", 2, 1, torch.float16),
    ("DT_INT8", 3, 2, torch.int8),
    ("DT_UINT8", 4, 4, torch.uint8),
    ("DT_INT16", 5, 6, torch.int16),
    ("DT_UINT16", 6, 7, torch.uint16),
    ("DT_INT32", 7, 3, torch.int32),
    ("DT_INT64", 8, 9, torch.int64),
    ("DT_UINT32", 9, 8, torch.uint32),
    ("DT_UINT64", 10, 10, torch.uint64),
    ("DT_BOOL", 11, 12, torch.bool),
    ("DT_DOUBLE", 12, 11, torch.float64),
    ("DT_COMPLEX64", 16, 16, torch.complex64),
    ("DT_COMPLEX128", 17, 17, torch.complex128),
    ("DT_BF16", 27, 27, torch.bfloat16),
    ("DT_COMPLEX32", 32, 33, torch.complex32),
    ("DT_FLOAT8_E5M2", 34, 35, torch.float8_e5m2),
    ("DT_FLOAT8_E4M3FN", 35, 36, torch.float8_e4m3fn),
)

_FROM_PROTO = {proto: dtype for _, proto, _, dtype in _TABLE}
_FROM_GE = {ge: dtype for _, _, ge, dtype in _TABLE}
_TO_GE = {dtype: ge for _, _, ge, dtype in _TABLE}
_FROM_NAME = {name: dtype for name, _, _, dtype in _TABLE} | {
    # other spellings that occur in operator prototypes
    "DT_FLOAT32": torch.float32,
    "DT_FP32": torch.float32,
    "DT_FP16": torch.float16,
    "DT_HALF": torch.float16,
    "DT_BFLOAT16": torch.bfloat16,
    "DT_FLOAT64": torch.float64,
}
_NAMES = {dtype: name for name, _, _, dtype in _TABLE}

#: Half-precision floats: arithmetic on them accumulates in fp32 and rounds once per GE node.
HALF = frozenset({torch.float16, torch.bfloat16})
_FLOATING = frozenset({torch.float32, torch.float64}) | HALF
_INTEGER = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

#: The named type classes of operator prototypes (``TensorType::RealNumberType()``).
TYPE_CLASSES: dict[str, frozenset[torch.dtype]] = {
    "ALL": frozenset(_NAMES),
    # the classes of CANN's headers leave out bool, which the kernels of these ops take
    "BasicType": _FLOATING | _INTEGER | _COMPLEX | {torch.bool},
    "NumberType": _FLOATING | _INTEGER | _COMPLEX,
    "RealNumberType": _FLOATING | _INTEGER,
    "REALNUMBERTYPE": _FLOATING | _INTEGER,
    "UnaryDataType": _FLOATING | _COMPLEX,
    "FloatingDataType": _FLOATING,
    "IntegerDataType": _INTEGER,
    "IndexNumberType": frozenset({torch.int32, torch.int64}),
}


def from_proto(number: int) -> torch.dtype | None:
    """Return the torch dtype of a number of ``ge_ir.proto``, None for one torch does not have."""
    return _FROM_PROTO.get(number)


def from_ge(number: int) -> torch.dtype:
    """Return the torch dtype of a ``ge::DataType`` number.

    Raises:
        ValueError: torch has no such dtype, or the engine does not compute in it.
    """
    try:
        return _FROM_GE[number]
    except KeyError:
        raise ValueError(
            f"ge::DataType {number} is not a dtype that the engine computes in"
        ) from None


def to_ge(dtype: torch.dtype) -> int:
    """Return the ``ge::DataType`` number of a torch dtype."""
    return _TO_GE[dtype]


def from_name(name: str) -> torch.dtype | None:
    """Return the torch dtype that a prototype calls ``DT_...``, None when torch has none."""
    return _FROM_NAME.get(name)


def name_of(dtype: torch.dtype) -> str:
    """Return the ``DT_...`` name of a torch dtype."""
    return _NAMES.get(dtype, str(dtype))
