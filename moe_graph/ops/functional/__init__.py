"""The public functions: named and documented forms of ``torch.ops.moe_graph.*``, by family.

Shapes: T tokens, H hidden size, K experts per token, E experts, C capacity, R rows grouped by
expert (``T * K`` unless said otherwise).
"""

from __future__ import annotations

from moe_graph.ops.functional import (
    distribute,
    experts,
    finalize_routing,
    gating,
    init_routing,
    products,
    routing_map,
    token_permute,
)
from moe_graph.ops.functional.distribute import *  # noqa: F403
from moe_graph.ops.functional.experts import *  # noqa: F403
from moe_graph.ops.functional.finalize_routing import *  # noqa: F403
from moe_graph.ops.functional.gating import *  # noqa: F403
from moe_graph.ops.functional.init_routing import *  # noqa: F403
from moe_graph.ops.functional.products import *  # noqa: F403
from moe_graph.ops.functional.routing_map import *  # noqa: F403
from moe_graph.ops.functional.token_permute import *  # noqa: F403

__all__: list[str] = []
__all__ += distribute.__all__
__all__ += experts.__all__
__all__ += finalize_routing.__all__
__all__ += gating.__all__
__all__ += init_routing.__all__
__all__ += products.__all__
__all__ += routing_map.__all__
__all__ += token_permute.__all__
