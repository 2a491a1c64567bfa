"""Public functions on expert ids, counts and rows."""

from __future__ import annotations

__all__: list[str] = []
