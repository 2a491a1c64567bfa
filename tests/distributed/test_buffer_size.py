"""Buffer sizes against the formulas worked out by hand."""

from __future__ import annotations

from moe_graph.distributed import buffer_size
from moe_graph.distributed.buffer_size import MIB


def test_fullmesh() -> None:
    # A row of 7168 bfloat16 is 14336 bytes; with 64 more, in 512: 14848. Back: 14336.
    sizes = {"max_bs": 64, "hidden": 7168, "top_k": 8, "ep_world_size": 16, "local_experts": 16}
    want = 2 * (16 * 64 * 16 * 14848 + 9 * 64 * 14336)
    assert buffer_size.fullmesh_bytes(**sizes, shared_experts=1) == want
    assert buffer_size.fullmesh_bytes(**sizes, shared_experts=1, on_950=True) == want + 16 * 1024


def test_fullmesh_v2_loses_32_bytes_of_each_block() -> None:
    # 14400 bytes are exactly 30 blocks of 480.
    got = buffer_size.fullmesh_bytes(
        max_bs=1, hidden=7168, top_k=1, ep_world_size=2, local_experts=1, fullmesh_v2=True
    )
    assert got == 2 * (2 * 30 * 512 + 14336)


def test_hierarchy() -> None:
    got = buffer_size.hierarchy_bytes(max_bs=32, hidden=4096, top_k=6, experts=128)
    assert got == 128 * 32 * (8192 + 32 * 4 + 64) + 404 * MIB  # 3 * 13 // 8 * 8
    got = buffer_size.hierarchy_bytes(max_bs=64, hidden=6144, top_k=8, experts=256)
    assert got == 256 * 64 * (12288 + 40 * 4 + 64) + 404 * MIB  # 3 * 15 // 8 * 8


def test_a2() -> None:
    got = buffer_size.a2_fullmesh_bytes(
        max_bs=128, hidden=7168, top_k=8, ep_world_size=32, local_experts=8
    )
    assert got == 2 * (128 * 32 * 8 * 14336 + 2 * MIB)
    got = buffer_size.a2_hierarchy_bytes(max_bs=1, hidden=16, top_k=8, ep_world_size=16, experts=64)
    assert got == (64 + 4) * 512 + 8 * MIB
