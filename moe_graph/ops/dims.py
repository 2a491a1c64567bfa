"""Arithmetic and comparison of dimensions that may be unknown or symbolic.

A dimension is an int, ``-1`` (unknown, as in GE), a ``torch.SymInt`` or a ``sympy.Expr``. The
functions here never decide a symbolic comparison by adding a guard, except :func:`may_equal`, whose
equalities the op cannot do without.
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

Dim: TypeAlias = Any
"""``int | torch.SymInt | sympy.Expr``; sympy has no type information."""

UNKNOWN = -1
UNKNOWN_RANK = (-2,)
"""The shape that GE uses for a tensor of unknown rank."""


def is_unknown(dim: Dim) -> bool:
    """True for ``-1``, without asking a symbol for its value."""
    return isinstance(dim, int) and dim == UNKNOWN


def mul(a: Dim, b: Dim) -> Dim:
    """Return ``a * b``, unknown when either is."""
    return UNKNOWN if is_unknown(a) or is_unknown(b) else a * b


def minimum(a: Dim, b: Dim) -> Dim:
    """Return ``min(a, b)`` as an expression, unknown when either is."""
    if is_unknown(a) or is_unknown(b):
        return UNKNOWN
    if _is_sympy(a) or _is_sympy(b):
        return _sympy().Min(_expr(a), _expr(b))
    return torch.sym_min(a, b)


def floordiv(a: Dim, b: Dim) -> Dim:
    """Return ``a // b``, unknown when either is."""
    if is_unknown(a) or is_unknown(b):
        return UNKNOWN
    if _is_sympy(a) or _is_sympy(b):
        return _sympy().floor(_expr(a) / _expr(b))
    return a // b


def ceildiv(a: Dim, b: int) -> Dim:
    """Return ``a`` divided by the positive `b`, rounded up; unknown when `a` is."""
    return UNKNOWN if is_unknown(a) else floordiv(a + b - 1, b)


def may_equal(a: Dim, b: Dim) -> bool:
    """False when `a` and `b` are known to differ.

    Two backed SymInts that are not known to be equal get the guard ``a == b``, two unbacked ones a
    runtime assertion; sympy expressions that may be equal count as equal.
    """
    if is_unknown(a) or is_unknown(b):
        return True
    if _is_sympy(a) or _is_sympy(b):
        difference = _sympy().simplify(_expr(a) - _expr(b))
        return difference.is_zero is not False
    equal = a == b
    if isinstance(equal, bool):
        return equal
    from torch.fx.experimental.symbolic_shapes import expect_true

    return bool(expect_true(equal))


def known_less(a: Dim, b: Dim) -> bool:
    """True when ``a < b`` holds for every value that the symbols can take."""
    if is_unknown(a) or is_unknown(b):
        return False
    if _is_sympy(a) or _is_sympy(b):
        return bool((_expr(a) < _expr(b)) == True)  # noqa: E712  a sympy relation, not a bool
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a < b)


def _is_sympy(dim: object) -> bool:
    # Where nobody imported sympy nothing can be one of its expressions.
    return "sympy" in sys.modules and isinstance(dim, _sympy().Basic)


def _expr(dim: Any) -> Any:
    return dim.node.expr if isinstance(dim, torch.SymInt) else _sympy().sympify(dim)


def _sympy() -> Any:
    import sympy  # type: ignore[import-untyped]

    return sympy
