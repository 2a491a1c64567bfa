"""Dispatch to and combine from the experts of other ranks: one module per GE op."""

from __future__ import annotations
