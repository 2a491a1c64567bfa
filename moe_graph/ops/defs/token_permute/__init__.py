"""MoeTokenPermute, MoeTokenUnpermute and their kin: one module per GE op."""

from __future__ import annotations
