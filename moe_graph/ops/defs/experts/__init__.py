"""Small ops on expert ids, counts and rows: one module per GE op."""

from __future__ import annotations
