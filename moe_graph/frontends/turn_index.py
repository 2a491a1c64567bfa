"""Subscripts in a turn: of masks, counts and lists of experts, by tokens, and from end to end.

::

    mask[e]                 Selection               ends[e]             Cursor
    x[token], x[None, token]    Rows                x[start:end]        Rows, written x_by_expert[e]
    counts[e]               Count                   experts[e]          OneOf
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sized

import torch
from torch import nn

from moe_graph.frontends.purity import MISSING
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.spelling import index_parts, is_full_slice, whole_number
from moe_graph.frontends.turn_base import TurnBase
from moe_graph.frontends.values import (
    Count,
    Counts,
    Cursor,
    Expert,
    Mask,
    OneOf,
    Order,
    Rows,
    RowsTuple,
    Selection,
    Static,
    Value,
)


class Indexing(TurnBase):
    """Rules for subscripts and attributes."""

    def _of_subscript(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.Subscript)
        if isinstance(node.ctx, ast.Load):
            expert = self._expert(node)
            if expert is not None:
                return expert
        parts = index_parts(node)
        experts = [self._expert(part) for part in parts]
        thing = self._reading.static(node.value)
        if len(parts) == 1 and isinstance(thing, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            if experts[0] is not None:
                self._note_thing(node.value, thing)
            else:
                self.value(parts[0])
            return OneOf(tuple(thing.values() if isinstance(thing, nn.ModuleDict) else thing))
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return self._size(self.value(node.value.value), whole_number(parts[0]))
        base = self.value(node.value)
        if isinstance(base, Counts):
            return self._counted(node, base, experts[0], parts)
        if isinstance(base, Mask) and any(experts):
            return self._selected(node, base, parts, experts)
        if isinstance(parts[0], ast.Slice):
            cut = self._cut(node, base, parts)
            if cut is not None:
                return cut
        values = [
            Static(None) if expert is not None else self._index_value(part)
            for part, expert in zip(parts, experts, strict=True)
        ]
        if any(expert is not None for expert in experts):
            self._by_expert(node, thing, parts, experts, values)
        return self._indexed(base, parts, values)

    def _index_value(self, part: ast.expr) -> Value:
        if isinstance(part, ast.Slice):
            for bound in (part.lower, part.upper, part.step):
                if bound is not None:
                    self.value(bound)
            return Static(part)
        return self.of_this_loop(self.value(part))

    def _indexed(self, base: Value, parts: list[ast.expr], values: list[Value]) -> Value:
        for place, value in enumerate(values):
            if isinstance(value, Rows | Selection):
                return Rows(value.key, leading=place == 0, counted=place == 0, fresh=True)
        if isinstance(base, Rows):
            return Rows(base.key, leading=base.leading and is_full_slice(parts[0]))
        if isinstance(base, RowsTuple):
            return Rows(base.key, leading=True, counted=base.counted)
        return Value()

    def _note_thing(self, node: ast.expr, thing: Sized) -> None:
        if not self.conditional:
            self.things.append((node, len(thing)))

    def _by_expert(
        self,
        node: ast.Subscript,
        thing: object,
        parts: list[ast.expr],
        experts: list[Expert | None],
        values: list[Value],
    ) -> None:
        """``x[e]`` with the expert as a tensor of one number keeps an axis of size 1."""
        if thing is MISSING and isinstance(node.value, ast.Call):
            thing = self._reading.static(node.value)
        if experts[0] is not None and isinstance(thing, torch.Tensor):
            self._note_thing(node.value, thing)
        rows = any(isinstance(value, Rows) for value in values)
        if all(expert is None or expert.form != "row" for expert in experts) or rows:
            return
        if len(parts) > 1:
            raise Refusal(
                "expert-number",
                node,
                f"the number of the expert as a tensor in {ast.unparse(node)}",
                "it alone, or with the places of its tokens",
            )
        self._instead[id(node)] = _one_row(node)

    def _selected(
        self, node: ast.Subscript, mask: Mask, parts: list[ast.expr], experts: list[Expert | None]
    ) -> Value:
        """``mask[e]``, ``mask[:, e]``: the slots that chose this expert."""
        place = 0 if mask.axis == 0 else len(parts) - 1
        others = [part for n, part in enumerate(parts) if n != place]
        if experts[place] is None or not all(is_full_slice(part) for part in others):
            return Value()
        if mask.axis == -1 and mask.rank != len(parts) and not isinstance(parts[0], ast.Constant):
            return Value()
        if experts[place] == Expert("row"):
            if len(parts) > 1:
                return Value()
            self._instead[id(node)] = _one_row(node)
        chosen = Selection(mask.key)
        if isinstance(node.value, ast.Name) and self.of_this_loop(chosen) == chosen:
            self.masks.append((node.value.id, mask.axis))
        return Selection(mask.key, mask.signed)

    def _counted(
        self, node: ast.Subscript, counts: Counts, expert: Expert | None, parts: list[ast.expr]
    ) -> Value:
        if expert is not None and not counts.running:
            return self.of_this_loop(Count(counts.key))
        if counts.running and expert is not None:
            return Cursor(counts.key, end=True)
        index = parts[0]
        before = (
            isinstance(index, ast.BinOp)
            and isinstance(index.op, ast.Sub)
            and whole_number(index.right) == 1
            and self._expert(index.left) is not None
        )
        return Cursor(counts.key, end=False) if counts.running and before else Value()

    def _cut(self, node: ast.Subscript, base: Value, parts: list[ast.expr]) -> Value | None:
        """``x[start:end]`` in the order of the experts: the rows of this one."""
        cut = parts[0]
        if not isinstance(cut, ast.Slice) or cut.lower is None or cut.upper is None:
            return None
        lower, upper = self.value(cut.lower), self.value(cut.upper)
        if not isinstance(lower, Cursor) and not isinstance(upper, Cursor):
            return None
        whole = all(is_full_slice(part) for part in parts[1:]) and cut.step is None
        begins = isinstance(lower, Cursor) and not lower.end
        if not isinstance(upper, Cursor) or not upper.end or not begins or not whole:
            raise Refusal("slice", node, ast.unparse(node), "rows from one end to the next")
        key = upper.key
        if self.key not in (None, key) or not isinstance(node.value, ast.Name):
            raise Refusal(
                "slice", node, ast.unparse(node), "a tensor, and the counts of one choice"
            )
        if base != Order(key):
            raise Refusal(
                "order",
                node,
                f"a slice of {node.value.id}",
                "one row per slot, in the order of a sort of the ids that were counted",
            )
        self.key = key
        name = self.parts.setdefault(node.value.id, f"_{node.value.id}_by_expert")
        self._instead[id(node)] = ast.Subscript(
            value=ast.Name(id=name, ctx=ast.Load()),
            slice=ast.Name(id=self.expert, ctx=ast.Load()),
            ctx=ast.Load(),
        )
        return Rows(key, leading=True, counted=True)

    def _of_attribute(self, node: ast.expr) -> Value:
        assert isinstance(node, ast.Attribute)
        thing = self._reading.static(node)
        if thing is not MISSING:
            return Static(thing)
        base = self.value(node.value)
        keeps = node.attr in ("T", "mT") and isinstance(base, Rows)
        return Rows(base.key) if keeps and isinstance(base, Rows) else Value()


def _one_row(node: ast.Subscript) -> ast.Subscript:
    """``x[e]`` -> ``x[e : e + 1]``."""
    index = node.slice
    upper = ast.BinOp(left=copy.deepcopy(index), op=ast.Add(), right=ast.Constant(value=1))
    cut = ast.Slice(lower=index, upper=upper)
    row = ast.Subscript(value=node.value, slice=cut, ctx=node.ctx)
    return ast.fix_missing_locations(ast.copy_location(row, node))
