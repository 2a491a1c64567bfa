"""Public functions that permute by a routing map."""

from __future__ import annotations

__all__: list[str] = []
