"""Permutation by a routing map, forward and backward: one module per GE op."""

from __future__ import annotations
