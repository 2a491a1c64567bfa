"""Attributes that dispatch and combine have in common, in IR order."""

from __future__ import annotations

from moe_graph.ops.opdef import Attr

GROUP = (
    Attr("group_ep", "Str"),
    Attr("ep_world_size", "Int"),
    Attr("ep_rank_id", "Int"),
    Attr("moe_expert_num", "Int"),
    Attr("group_tp", "Str", ""),
    Attr("tp_world_size", "Int", 0),
    Attr("tp_rank_id", "Int", 0),
    Attr("expert_shard_type", "Int", 0),
    Attr("shared_expert_num", "Int", 1),
    Attr("shared_expert_rank_num", "Int", 0),
)

CONTEXT = (
    *GROUP[1:4],
    Attr("ccl_buffer_size", "Int"),
    *(attr for attr in GROUP[5:]),
)
"""What the third version has instead: its first input, ``context``, stands for the groups."""

SECOND_VERSION = (
    Attr("comm_alg", "Str", ""),
    Attr("zero_expert_num", "Int", 0),
    Attr("copy_expert_num", "Int", 0),
    Attr("const_expert_num", "Int", 0),
)

EXAMPLE = {"group_ep": "ep", "ep_world_size": 16, "ep_rank_id": 0, "moe_expert_num": 64}
"""Attributes of the uses that the documentation prints."""

THIRD_EXAMPLE = {name: EXAMPLE[name] for name in EXAMPLE if name != "group_ep"} | {
    "ccl_buffer_size": 0
}
"""The same for the third version."""
