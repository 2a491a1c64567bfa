"""Which canonical op every spelling stands for: the data behind :mod:`moe_graph.passes.canonical`.

A canonical op has the name of its ATen op where there is one. Three merge what PyTorch keeps apart:

==========  ==========================================================================
``cast``    another dtype: ``.to(dtype)``, ``.float()``, ``.type_as(x)``, ``_to_copy``
``reshape`` the same elements in the same row-major order: ``view``, ``flatten``,
            ``unsqueeze``, ``squeeze``, ``contiguous``, ``clone``, ...
``permute`` the same elements in another order of dimensions: ``transpose``, ``t``, ``mT``
==========  ==========================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

REQUIRED = object()
"""Stands for an argument that has no default."""

SIGNATURES: dict[str, dict[str, Any]] = {
    "add": {"input": REQUIRED, "other": REQUIRED, "alpha": 1},
    "arange": {"start": REQUIRED, "end": None, "step": 1},
    "empty": {},
    "ones": {},
    "zeros": {},
    "any": {"input": REQUIRED, "dim": None, "keepdim": False},
    "argmax": {"input": REQUIRED, "dim": None, "keepdim": False},
    "argsort": {"input": REQUIRED, "dim": -1, "descending": False, "stable": False},
    "bincount": {"input": REQUIRED, "weights": None, "minlength": 0},
    "bmm": {"input": REQUIRED, "mat2": REQUIRED},
    "cat": {"tensors": REQUIRED, "dim": 0},
    "chunk": {"input": REQUIRED, "chunks": REQUIRED, "dim": 0},
    "cumsum": {"input": REQUIRED, "dim": REQUIRED, "dtype": None},
    "detach": {"input": REQUIRED},
    "div": {"input": REQUIRED, "other": REQUIRED, "rounding_mode": None},
    "dropout": {"input": REQUIRED, "p": 0.5, "training": True, "inplace": False},
    "einsum": {"equation": REQUIRED, "operands": REQUIRED},
    "expand": {"input": REQUIRED, "size": REQUIRED},
    "full": {"size": REQUIRED, "fill_value": REQUIRED},
    "full_like": {"input": REQUIRED, "fill_value": REQUIRED},
    "gather": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED},
    "eq": {"input": REQUIRED, "other": REQUIRED},
    "ge": {"input": REQUIRED, "other": REQUIRED},
    "grouped_mm": {
        "input": REQUIRED,
        "weight": REQUIRED,
        "offs": None,
        "bias": None,
        "out_dtype": None,
    },
    "histc": {"input": REQUIRED, "bins": 100, "min": 0, "max": 0},
    "item": {"input": REQUIRED},
    "index": {"input": REQUIRED, "indices": REQUIRED},
    "index_add": {
        "input": REQUIRED,
        "dim": REQUIRED,
        "index": REQUIRED,
        "source": REQUIRED,
        "alpha": 1,
    },
    "index_copy": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED, "source": REQUIRED},
    "index_put": {
        "input": REQUIRED,
        "indices": REQUIRED,
        "values": REQUIRED,
        "accumulate": False,
    },
    "index_select": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED},
    "linear": {"input": REQUIRED, "weight": REQUIRED, "bias": None},
    "masked_fill": {"input": REQUIRED, "mask": REQUIRED, "value": REQUIRED},
    "masked_select": {"input": REQUIRED, "mask": REQUIRED},
    "matmul": {"input": REQUIRED, "other": REQUIRED},
    "max": {"input": REQUIRED, "dim": None, "keepdim": False},
    "mul": {"input": REQUIRED, "other": REQUIRED},
    "narrow": {"input": REQUIRED, "dim": REQUIRED, "start": REQUIRED, "length": REQUIRED},
    "new_full": {"input": REQUIRED, "size": REQUIRED, "fill_value": REQUIRED},
    "nonzero": {"input": REQUIRED, "as_tuple": False},
    "one_hot": {"input": REQUIRED, "num_classes": -1},
    "select": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED},
    "remainder": {"input": REQUIRED, "other": REQUIRED},
    "repeat_interleave": {"input": REQUIRED, "repeats": None, "dim": None, "output_size": None},
    "scatter": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED, "src": REQUIRED},
    "scatter_add": {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED, "src": REQUIRED},
    "scatter_reduce": {
        "input": REQUIRED,
        "dim": REQUIRED,
        "index": REQUIRED,
        "src": REQUIRED,
        "reduce": REQUIRED,
        "include_self": True,
    },
    "searchsorted": {
        "sorted_sequence": REQUIRED,
        "input": REQUIRED,
        "right": False,
        "side": None,
    },
    "silu": {"input": REQUIRED},
    "slice": {"input": REQUIRED, "index": REQUIRED},
    "softmax": {"input": REQUIRED, "dim": None, "dtype": None},
    "sort": {"input": REQUIRED, "dim": -1, "descending": False, "stable": False},
    "split": {"input": REQUIRED, "split_size": REQUIRED, "dim": 0},
    "sub": {"input": REQUIRED, "other": REQUIRED, "alpha": 1},
    "sum": {"input": REQUIRED, "dim": None, "keepdim": False, "dtype": None},
    "topk": {"input": REQUIRED, "k": REQUIRED, "dim": -1, "largest": True, "sorted": True},
    "where": {"condition": REQUIRED, "input": None, "other": None},
}
"""Canonical op -> its arguments in order with their defaults, where rules read them by name."""

ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "addcmul",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "div",
        "elu",
        "eq",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "ge",
        "gelu",
        "gt",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "isfinite",
        "isnan",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log1p",
        "logical_and",
        "logical_not",
        "logical_or",
        "logsigmoid",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "nan_to_num",
        "ne",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "relu6",
        "rsqrt",
        "rsub",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "softplus",
        "softsign",
        "sqrt",
        "square",
        "sub",
        "tanh",
        "tanhshrink",
        "where",
        "xlogy",
    ]
)
"""Ops whose result at a position depends on the operands at that position only."""

POSITIVE = frozenset(["exp", "sigmoid", "softmax"])
"""Ops of positive numbers: a result of zero is one that is too small for its dtype."""

MERGED = {
    "cast": (
        "_to_copy bfloat16 bool convert_element_type double float half int long short to type "
        "type_as"
    ),
    "reshape": (
        "_unsafe_view atleast_1d atleast_2d clone contiguous flatten lift_fresh_copy ravel reshape "
        "reshape_as squeeze unflatten unsqueeze view view_as alias"
    ),
    "permute": "adjoint mT T movedim permute swapaxes swapdims t transpose",
    "matmul": "matmul mm __matmul__",
    "cat": "cat concat concatenate",
    "expand": "broadcast_to expand expand_as",
    "split": "split split_with_sizes",
    "remainder": "fmod remainder",
    "max": "max",
    "softmax": "_softmax softmax",
    "clamp": "clamp clip",
    "sub": "sub subtract",
    "mul": "mul multiply",
    "div": "div divide true_divide",
    "rms_norm": "rms_norm _fused_rms_norm",
    "layer_norm": "layer_norm native_layer_norm",
    "norm": "linalg_vector_norm norm",
    "grouped_mm": "_grouped_mm grouped_mm grouped_mm_fallback",
    "set_grad_enabled": "_set_grad_enabled",
}
"""Canonical op -> the names that stand for it. A name that is not listed stands for itself."""

CANONICAL = {name: op for op, names in MERGED.items() for name in names.split()}

VIEWS = frozenset(
    [
        "cast",
        "chunk",
        "detach",
        "expand",
        "narrow",
        "permute",
        "reshape",
        "slice",
        "split",
        "unbind",
        "select",
        "result",
    ]
)
"""Ops whose result may share memory with their first argument."""

RANDOM = frozenset(
    [
        "bernoulli",
        "dropout",
        "exponential",
        "multinomial",
        "normal",
        "rand",
        "rand_like",
        "randint",
        "randn",
        "randn_like",
        "uniform",
    ]
)
"""Ops that draw random numbers: they are neither moved nor dropped."""

OPERATORS: dict[Callable[..., Any], tuple[str, dict[str, Any]]] = {
    operator.add: ("add", {}),
    operator.sub: ("sub", {}),
    operator.mul: ("mul", {}),
    operator.truediv: ("div", {}),
    operator.floordiv: ("div", {"rounding_mode": "floor"}),
    torch.floor_divide: ("div", {"rounding_mode": "floor"}),
    operator.mod: ("remainder", {}),
    operator.matmul: ("matmul", {}),
    operator.neg: ("neg", {}),
    operator.invert: ("logical_not", {}),
    operator.pow: ("pow", {}),
    operator.eq: ("eq", {}),
    operator.ne: ("ne", {}),
    operator.lt: ("lt", {}),
    operator.le: ("le", {}),
    operator.gt: ("gt", {}),
    operator.ge: ("ge", {}),
}
"""Python operators and functions that need extra arguments."""

IN_PLACE_OPERATORS: dict[Callable[..., Any], tuple[str, dict[str, Any]]] = {
    operator.iadd: ("add", {}),
    operator.isub: ("sub", {}),
    operator.imul: ("mul", {}),
    operator.itruediv: ("div", {}),
    operator.ifloordiv: ("div", {"rounding_mode": "floor"}),
    operator.imod: ("remainder", {}),
    operator.ipow: ("pow", {}),
}
"""Python operators that write their first argument."""

METHOD_EXTRAS: dict[str, tuple[str, dict[str, Any]]] = {
    "floor_divide": ("div", {"rounding_mode": "floor"}),
}
"""Names, as method or ATen packet, that need extra arguments."""

ARGUMENT_NAMES = {
    "self": "input",
    "tensor": "input",
    "x": "input",
    "mat": "input",
    "value": "src",
    "split_sizes": "split_size",
    "split_size_or_sections": "split_size",
    "axis": "dim",
}
"""Other names of arguments -> the name in :data:`SIGNATURES`; used where the signature has it."""


OTHERS = frozenset(
    [
        "amax",
        "amin",
        "empty",
        "empty_like",
        "layer_norm",
        "log_softmax",
        "logsumexp",
        "mean",
        "new_empty",
        "new_ones",
        "new_zeros",
        "norm",
        "ones",
        "ones_like",
        "repeat",
        "rms_norm",
        "set_grad_enabled",
        "stack",
        "var",
        "zeros",
        "zeros_like",
    ]
)
"""Ops that rules know without reading their arguments by name."""

KNOWN = frozenset(SIGNATURES) | ELEMENTWISE | VIEWS | RANDOM | OTHERS
"""All canonical ops; a call of one of them writes and aliases only what its spelling says."""


def _functions() -> dict[Callable[..., Any], str]:
    """Return every function of torch that spells an op that the passes know by name."""
    names = KNOWN | set(CANONICAL)
    found: dict[Callable[..., Any], str] = {}
    for module in (torch, torch.nn.functional, torch.special, torch.linalg, torch._C._nn):
        for name in sorted(names):
            function = getattr(module, name, None)
            if callable(function) and function not in OPERATORS:
                found.setdefault(function, name)
            in_place = getattr(module, f"{name}_", None)
            if callable(in_place):
                found.setdefault(in_place, f"{name}_")
    found[torch._C._set_grad_enabled] = "_set_grad_enabled"
    return found


FUNCTIONS = _functions()
"""Functions of torch -> the name that they are looked up by."""
