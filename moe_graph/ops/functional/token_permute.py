"""Public functions that permute token copies and bring them back."""

from __future__ import annotations

__all__: list[str] = []
