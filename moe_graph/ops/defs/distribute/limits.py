"""Ranges of sizes per product: the newer tables by default, the older product page beside them.

`BS` is the tokens of this rank, `K` the experts per token, `H` the hidden size, `ep` the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from moe_graph.config import Soc
from moe_graph.ops.defs.distribute.checks import (
    FULLMESH_V2,
    RANKS_PER_SERVER,
    comm_alg,
    is_ccu,
    is_hierarchy,
    special_experts,
)
from moe_graph.ops.dims import Dim, known_less
from moe_graph.ops.limit import Limit, attribute, dim
from moe_graph.ops.opdef import Call

Quantity = Callable[[Call], Dim | None]
Condition = Callable[[Call], bool]

A2, A3, A5 = Soc.A2, Soc.A3, Soc.ASCEND950
_V2: Final = "ops-transformer mc2 {op} tiling, July 2026"
_PAGE: Final = "hiascend.com, product page of npu_moe_distribute_dispatch"


def _if(condition: Condition, quantity: Quantity) -> Quantity:
    return lambda op: quantity(op) if condition(op) else None


def _fullmesh(op: Call) -> bool:
    return not is_hierarchy(op)


def _several_servers(op: Call) -> bool:
    return bool(op.ep_world_size > RANKS_PER_SERVER)


def _experts_per_rank(op: Call) -> int:
    shared_ranks = 0 if op.soc is Soc.A2 else op.shared_expert_rank_num  # A2 does not read it
    ranks = op.ep_world_size - shared_ranks
    experts: int = op.moe_expert_num // ranks if ranks > 0 else 0
    return experts


def limits(op: str, hidden: str) -> tuple[Limit, ...]:
    """Return the ranges of the second version of an op.

    Args:
        op: its directory in ops-transformer.
        hidden: the input whose dim 1 is H.
    """
    source = _V2.format(op=op)

    def limit(argument: str, what: str, value: Quantity, *products: Soc, **range_: Any) -> Limit:
        return Limit(argument, what, value, source, products=products, **range_)

    ep, experts = attribute("ep_world_size"), attribute("moe_expert_num")
    tokens, top_k, width = dim("expert_ids", 0), dim("expert_ids", 1), dim(hidden, 1)
    return (
        limit("ep_world_size", "ep", _if(_fullmesh, ep), A2, low=1, high=384),
        limit("ep_world_size", "ep (hierarchy)", _if(is_hierarchy, ep), A2, low=1, high=64),
        limit("ep_world_size", "ep above 8", _if(_several_servers, ep), A2, multiple_of=8),
        limit("ep_world_size", "ep", _if(_fullmesh, ep), A3, low=2, high=768),
        limit("ep_world_size", "ep", _if(_fullmesh, ep), A5, low=2, high=1024),
        limit(
            "ep_world_size",
            "ep (hierarchy)",
            _if(is_hierarchy, ep),
            A3,
            A5,
            low=2,
            high=256,
            multiple_of=16,
        ),
        limit("moe_expert_num", "E", _if(_fullmesh, experts), A2, A3, A5, low=1, high=1024),
        limit("moe_expert_num", "E (hierarchy)", _if(is_hierarchy, experts), A2, A3, A5, high=512),
        limit(
            "moe_expert_num",
            "experts per rank * ep",
            _if(lambda op: not is_ccu(op), lambda op: _experts_per_rank(op) * op.ep_world_size),
            A3,
            A5,
            low=1,
            high=2048,
        ),
        limit(
            "shared_expert_num", "shared experts", attribute("shared_expert_num"), A3, A5, high=4
        ),
        limit("expert_ids", "BS", _if(_fullmesh, tokens), A2, low=1, high=256),
        limit("expert_ids", "BS (hierarchy)", _if(is_hierarchy, tokens), A2, low=1, high=512),
        limit("expert_ids", "BS", _if(_fullmesh, tokens), A3, A5, low=1, high=512),
        limit("expert_ids", "BS (hierarchy)", _if(is_hierarchy, tokens), A3, A5, low=1, high=256),
        limit("expert_ids", "K", top_k, A2, A3, A5, low=1, high=16),
        limit(hidden, "H", width, A2, low=1, high=10240, multiple_of=32),
        limit(hidden, "H", _if(_fullmesh, width), A3, A5, low=1024, high=8192),
        limit(
            hidden,
            "H (hierarchy)",
            _if(is_hierarchy, width),
            A3,
            A5,
            low=1,
            high=7168,
            multiple_of=32,
        ),
    )


def fullmesh_v2_limits(op: str) -> tuple[Limit, ...]:
    """Return the ranges that dispatch has beyond :func:`limits` with ``comm_alg="fullmesh_v2"``."""

    def chosen(op: Call) -> bool:
        return comm_alg(op) == FULLMESH_V2

    source = _V2.format(op=op)
    return (
        Limit(
            "expert_ids",
            "BS (fullmesh_v2)",
            _if(chosen, dim("expert_ids", 0)),
            source,
            high=256,
            products=(A3,),
        ),
        Limit(
            "expert_ids",
            "K (fullmesh_v2)",
            _if(chosen, dim("expert_ids", 1)),
            source,
            high=12,
            products=(A3, A5),
        ),
    )


def first_version_limits(op: str, hidden: str) -> tuple[Limit, ...]:
    """Return the ranges of the first version of an op; arguments as for :func:`limits`."""
    source = _V2.format(op=op)
    newer = (A3, A5)
    ep, experts = attribute("ep_world_size"), attribute("moe_expert_num")
    return (
        Limit("ep_world_size", "ep", ep, source, 1, 256, multiple_of=8, products=(A2,)),
        Limit("ep_world_size", "ep", ep, source, one_of=_EP_OF_A3, products=(A3,)),
        Limit("ep_world_size", "ep", ep, source, one_of=(2, 4, *_EP_OF_A3), products=(A5,)),
        Limit("moe_expert_num", "E", experts, source, 1, 512),
        Limit(
            "moe_expert_num", "experts per rank", _experts_per_rank, source, 1, 24, products=(A2,)
        ),
        Limit(
            "shared_expert_num",
            "shared experts",
            attribute("shared_expert_num"),
            source,
            1,
            1,
            products=newer,
        ),
        Limit("expert_ids", "BS", dim("expert_ids", 0), source, 1, 256, products=(A2,)),
        Limit("expert_ids", "BS", dim("expert_ids", 0), source, 1, 512, products=newer),
        Limit("expert_ids", "K", dim("expert_ids", 1), source, 1, 16, products=(A2,)),
        Limit("expert_ids", "K", dim("expert_ids", 1), source, 1, 8, products=newer),
        Limit(hidden, "H", dim(hidden, 1), source, 1, 7168, multiple_of=32, products=(A2,)),
        Limit(hidden, "H", dim(hidden, 1), source, one_of=(7168,), products=newer),
    )


_EP_OF_A3: Final = (8, 16, 32, 64, 128, 144, 256, 288)

PRODUCT_PAGE_LIMITS: Final = (
    Limit(
        "ep_world_size",
        "ep",
        attribute("ep_world_size"),
        _PAGE,
        one_of=(16, 32, 64),
        products=(A2,),
    ),
    Limit(
        "ep_world_size", "ep", attribute("ep_world_size"), _PAGE, one_of=_EP_OF_A3, products=(A3,)
    ),
    Limit("moe_expert_num", "E", attribute("moe_expert_num"), _PAGE, 1, 512, products=(A2, A3)),
    Limit("moe_expert_num", "experts per rank", _experts_per_rank, _PAGE, 1, 24, products=(A2,)),
    Limit(
        "shared_expert_num",
        "shared experts",
        attribute("shared_expert_num"),
        _PAGE,
        1,
        1,
        products=(A3,),
    ),
    Limit("expert_ids", "BS", dim("expert_ids", 0), _PAGE, 1, 256, products=(A2,)),
    Limit("expert_ids", "BS", dim("expert_ids", 0), _PAGE, 1, 512, products=(A3,)),
    Limit("expert_ids", "K", dim("expert_ids", 1), _PAGE, 1, 16, products=(A2,)),
    Limit("expert_ids", "K", dim("expert_ids", 1), _PAGE, 1, 8, products=(A3,)),
    Limit("x", "H", dim("x", 1), _PAGE, 1, 7168, multiple_of=32, products=(A2,)),
    Limit("x", "H", dim("x", 1), _PAGE, one_of=(7168,), products=(A3,)),
)
"""What the older product page allows; narrower than the default. A planner may ask for it."""


def check_top_k(op: Call, top_k: Dim) -> None:
    """Check that a token does not choose more experts than there are; combine by ccu does not look.

    Raises:
        OpError: it does.
    """
    total = op.moe_expert_num + special_experts(op)
    if known_less(total, top_k):
        raise op.error("expert_ids", got=f"K = {top_k}", want=f"<= {total} experts")
