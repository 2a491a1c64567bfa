"""Cases of the init_routing family that are not followed: ``(file, case)`` and the reason."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {}
