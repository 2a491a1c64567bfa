"""Routers: top-k of expert scores, one module per GE op."""

from __future__ import annotations
