"""The table of public cases that are not followed: ``(file, case)`` -> the reason."""

from __future__ import annotations

from tests.vectors.not_followed import (
    distribute,
    experts,
    finalize_routing,
    gating,
    init_routing,
    products,
    routing_map,
    token_permute,
)

NOT_FOLLOWED: dict[tuple[str, str], str] = {
    **distribute.REASONS,
    **experts.REASONS,
    **finalize_routing.REASONS,
    **gating.REASONS,
    **init_routing.REASONS,
    **products.REASONS,
    **routing_map.REASONS,
    **token_permute.REASONS,
}
