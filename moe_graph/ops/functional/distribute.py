"""Public functions of expert parallelism."""

from __future__ import annotations

__all__: list[str] = []
