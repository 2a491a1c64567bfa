"""Experts of MoeFinalizeRoutingV2 that have no weights: zero, copy and constant experts (950).

Each kind is a range ``[start, end)`` of expert ids, ``(-1, -1)`` for none; ranges do not overlap.
A copy (i, k) of such an expert ``e`` has no row in ``expanded_x``; its place is taken by

| range                     | in place of the row                                    |
|---------------------------|--------------------------------------------------------|
| ``zero_expert_range``     | nothing: the copy is skipped, with its bias            |
| ``copy_expert_range``     | ``x[i]``                                               |
| ``constant_expert_range`` | ``a1[c] * x[i] + a2[c] * v[c]`` with ``c = e - start`` |
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import Dim, known_less
from moe_graph.ops.opdef import Call

NO_RANGE = (-1, -1)
CONSTANT = "constant_expert_range"
RANGES = ("zero_expert_range", "copy_expert_range", CONSTANT)
CONSTANTS = ("a1", "a2", "v")


def has_special_experts(op: Any) -> bool:
    """Tell whether a call names any such expert."""
    return any(tuple(getattr(op, name)) != NO_RANGE for name in RANGES)


def check_ranges(op: Call, tokens: Dim, hidden: Dim) -> None:
    """Check the ranges against each other, against E, and the tensors that they need.

    Raises:
        OpError: a range is malformed, overlaps with another or goes beyond E; a tensor does not
            fit; the product has no such experts.
    """
    given = {name: getattr(op, name) for name in RANGES if getattr(op, name) != NO_RANGE}
    for name, ids in given.items():
        if op.soc is not Soc.ASCEND950:
            raise op.error(name, got=ids, want=f"{NO_RANGE} (no such experts)", limit=True)
        if len(ids) != 2 or not 0 <= ids[0] < ids[1]:
            raise op.error(name, got=ids, want=f"(start, end) with 0 <= start < end, or {NO_RANGE}")
        if op.bias is not None:
            experts = op.dims("bias", rank=2)[0]
            if known_less(experts, ids[1]):
                raise op.error(name, got=ids, want=f"ids up to E = {experts}, dim 0 of bias")
    _check_overlap(op, given)
    if given and op.expert_idx is None:
        raise op.error("expert_idx", got="nothing", want=f"a tensor, since {min(given)} is given")
    if op.x is not None:
        rows, width = op.dims("x", rank=2)
        op.expect_equal("x", rows, tokens, "dim 0")
        op.expect_equal("x", width, hidden, "dim 1")
    for name in CONSTANTS:
        if getattr(op, name) is None:
            continue
        rows, width = op.dims(name, rank=2)
        op.expect_equal(name, width, hidden, "dim 1")
        if CONSTANT in given:
            op.expect_equal(name, rows, given[CONSTANT][1] - given[CONSTANT][0], "dim 0")


def _check_overlap(op: Call, given: dict[str, tuple[int, int]]) -> None:
    in_order = sorted(given.items(), key=lambda item: item[1])
    for (before, first), (name, second) in itertools.pairwise(in_order):
        if second[0] < first[1]:
            raise op.error(name, got=second, want=f"no overlap with {before} = {first}")


class SpecialExperts:
    """Where the copies of such experts are, and what they contribute.

    Attributes:
        any: ``[K, T]`` bool, copies of any of the three kinds.
        zero: ``[K, T]`` bool, those of zero experts.
    """

    def __init__(self, op: Call, experts: torch.Tensor) -> None:
        self._op = op
        self._experts = experts
        self.zero, self._copy, self._constant = (
            _within(experts, getattr(op, name)) for name in RANGES
        )
        self.any = self.zero | self._copy | self._constant
        self._has_copies = bool(self._copy.any())
        self._has_constants = bool(self._constant.any())
        self._check_present()

    def _check_present(self) -> None:
        """Raise when a copy needs a tensor that is not there.

        Raises:
            OpError: it does.
        """
        needed = {"x": self._has_copies or self._has_constants}
        needed |= dict.fromkeys(CONSTANTS, self._has_constants)
        for name, is_needed in needed.items():
            if is_needed and getattr(self._op, name) is None:
                raise self._op.error(
                    name, got="nothing", want="a tensor, since expert_idx has experts that use it"
                )

    def replace(self, part: torch.Tensor, k: int, chunk: slice) -> torch.Tensor:
        """Return `part`, the rows of copies (chunk, k), with those of such experts replaced."""
        op = self._op
        if self._has_copies:
            mask = self._copy[k, chunk].unsqueeze(1)
            part = torch.where(mask, op.x[chunk].to(part.dtype), part)
        if self._has_constants:
            mask = self._constant[k, chunk].unsqueeze(1)
            ids = torch.where(mask[:, 0], self._experts[k, chunk] - op.constant_expert_range[0], 0)
            a1, a2, v = (
                getattr(op, name).index_select(0, ids).to(part.dtype) for name in CONSTANTS
            )
            part = torch.where(mask, a1.mul_(op.x[chunk]).add_(a2.mul_(v)), part)
        return part


def _within(ids: torch.Tensor, bounds: tuple[int, int]) -> torch.Tensor:
    return (ids >= bounds[0]) & (ids < bounds[1])
