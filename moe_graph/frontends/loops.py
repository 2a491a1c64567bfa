"""Writes the expert loops of a function anew, so that dynamo can trace them.

::

    hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
    for e in hit:                                   for e in range(mask.shape[0]):
        slot, token = torch.where(mask[e].squeeze(0))   slot, token = torch.where(mask[e])
        if token.numel() == 0:
            continue
        ...                                             ...

    counts = ids.bincount(minlength=E).tolist()
    start = 0                                       counts = zeros(E).scatter_add(0, ids, ones)
    for e, n in enumerate(counts):                  parts = x.split(counts.tolist())
        end = start + n                             for e in range(E):
        y.append(experts[e](x[start:end]))              y.append(experts[e](parts[e]))
        start = end

Only where a turn for an expert without tokens has no effect (``turn``); what no one reads any more
is left out. A loop for which that is not proved stays, with the condition that failed.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import TypeVar

from moe_graph.frontends.choices import Choices
from moe_graph.frontends.experts import (
    is_over_experts,
    key_of_loop,
    may_ask_for_tokens,
    number_of_experts,
    runs_over_unknown_hits,
    splits,
    targets_of,
)
from moe_graph.frontends.leftovers import (
    is_concatenation,
    lists_are_concatenated,
    read_after,
    without_unread,
)
from moe_graph.frontends.purity import Reading
from moe_graph.frontends.refusal import Refusal
from moe_graph.frontends.turn import Turn
from moe_graph.frontends.values import Hits, Mask


@dataclass
class Lifted:
    """What became of the loops of one function.

    Attributes:
        tree: the function with its loops lifted.
        loops: the loops that were.
        refused: those that were not, and why.
    """

    tree: ast.FunctionDef
    loops: list[ast.For] = field(default_factory=list)
    refused: list[tuple[ast.For, Refusal]] = field(default_factory=list)


def lift_loops(reading: Reading) -> Lifted:
    """Return the function of `reading` with the loops lifted that can be.

    The tree of `reading` is not changed.
    """
    lifted = Lifted(copy.copy(reading.source.tree))
    lifted.tree.body = _Block(reading, lifted).function()
    if lifted.loops:
        lifted.tree = without_unread(lifted.tree, reading)
    return lifted


class _Block:
    """Goes through statements in order, with what is known before each."""

    def __init__(self, reading: Reading, lifted: Lifted) -> None:
        self._reading = reading
        self._lifted = lifted
        self._joined: dict[str, str] = {}

    def function(self) -> list[ast.stmt]:
        """Return the statements of the function with its loops lifted."""
        body = self.run(self._reading.source.tree.body, Choices(self._reading))
        return [_WithRows(self._joined).visit(copy.deepcopy(statement)) for statement in body]

    def run(self, statements: list[ast.stmt], choices: Choices) -> list[ast.stmt]:
        written: list[ast.stmt] = []
        for statement in statements:
            written += self._statement(statement, choices)
        return written

    def _statement(self, node: ast.stmt, choices: Choices) -> list[ast.stmt]:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            for part in ast.walk(node):
                if isinstance(part, ast.NamedExpr):
                    choices.forget(part.target.id)
                elif isinstance(part, ast.Call):
                    discarded = isinstance(node, ast.Expr) and part is node.value
                    _note_write(part, choices, discarded)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                choices.bind(target, node.value)
        elif isinstance(node, ast.AugAssign):
            choices.write(node.target)
        elif isinstance(node, ast.Expr):
            choices.effect(node.value)
        elif isinstance(node, ast.With):
            return [_with_body(node, body=self.run(node.body, choices))]
        elif isinstance(node, ast.If):
            branches = [choices.copy(), choices.copy()]
            body = self.run(node.body, branches[0])
            orelse = self.run(node.orelse, branches[1])
            choices.merge(branches)
            return [_with_body(node, body=body, orelse=orelse)]
        elif isinstance(node, ast.For):
            written = self._loop(node, choices)
            _forget_bound(node, choices)
            return written
        else:
            _forget_bound(node, choices)
        return [node]

    def _loop(self, node: ast.For, choices: Choices) -> list[ast.stmt]:
        names = targets_of(node, choices)
        over_experts = is_over_experts(node, choices)
        if names is None and over_experts:
            unknown = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            want = "a loop over the experts with tokens, or over their counts by enumerate"
            self._lifted.refused.append((node, Refusal("loop", node, unknown, want)))
        if names is None and runs_over_unknown_hits(node, choices):
            unknown = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            want = "experts that are known to be those with tokens: nonzero() of a mask's sums"
            self._lifted.refused.append((node, Refusal("hits", node, unknown, want)))
        if names is None or not (over_experts or may_ask_for_tokens(node, choices, names)):
            return [node]
        turn = Turn(choices, node.body, names, key_of_loop(node, choices))
        read_later = read_after(self._reading.source.tree, node)
        try:
            if node.orelse:
                raise Refusal("statement", node.orelse[0], "an else branch of the loop", "none")
            body = turn.run(read_later)
            if not over_experts and not turn.values.tests and not turn.values.parts:
                return [node]  # dynamo can trace it
            lists_are_concatenated(self._reading, node, turn.lists)
            before, loop = self._written(node, choices, turn, body)
        except Refusal as refusal:
            if over_experts or _asks_for_tokens(turn, refusal):
                self._lifted.refused.append((node, refusal))
            return [node]
        self._lifted.loops.append(node)
        if turn.values.parts:
            self._joined |= dict.fromkeys(turn.lists, next(iter(turn.values.parts)))
        return [*(_placed(statement, node) for statement in before), loop]

    def _written(
        self, node: ast.For, choices: Choices, turn: Turn, body: list[ast.stmt]
    ) -> tuple[list[ast.stmt], ast.For]:
        loop = copy.copy(node)
        loop.body = body
        before: list[ast.stmt] = []
        experts = number_of_experts(node, choices, turn.values)
        if experts is not None:
            loop.target = _expert_target(node.target)
            loop.iter = ast.Call(
                func=ast.Name(id="range", ctx=ast.Load()), args=[experts], keywords=[]
            )
        if turn.values.parts:
            before += splits(node, choices, turn.values)
        hits = choices.value(node.iter)
        mask = hits.counts.mask if isinstance(hits, Hits) else None
        if mask is not None and mask.signed:
            before += _only_hits(mask, turn, loop)
        return before, ast.fix_missing_locations(ast.copy_location(loop, node))


class _WithRows(ast.NodeTransformer):
    """Says how many rows the parts of a tensor have together: as many as the tensor.

    Dynamo knows the parts by sizes that the data decide, and would take their sum for another
    such size. The parts of a split do add up, so that ``expand`` expands nothing.
    """

    def __init__(self, joined: dict[str, str]) -> None:
        self._joined = joined

    def visit_Call(self, node: ast.Call) -> ast.expr:
        parts = node.args[0] if node.args else None
        joins = isinstance(node.func, ast.Attribute) and is_concatenation(node)
        if not joins or not isinstance(parts, ast.Name) or parts.id not in self._joined:
            self.generic_visit(node)
            return node
        rows = f"{self._joined[parts.id]}.shape[0], *{parts.id}[0].shape[1:]"
        whole = _placed(ast.parse(f"joined.expand({rows})", mode="eval").body, node)
        assert isinstance(whole, ast.Call)
        assert isinstance(whole.func, ast.Attribute)
        whole.func.value = node
        return whole


_Node = TypeVar("_Node", bound=ast.AST)


def _placed(made: _Node, node: ast.AST) -> _Node:
    """Return a node that was made, with all its parts, at the line of another."""
    for part in ast.walk(made):
        ast.copy_location(part, node)
    return made


def _only_hits(mask: Mask, turn: Turn, loop: ast.For) -> list[ast.stmt]:
    """Clear the mask of experts that are not hit: its elements may be negative and sum up to 0."""
    names = {name for name, _ in turn.values.masks}
    if len(names) != 1 or mask.rank is None:
        raise Refusal("mask", loop, "a mask that may be negative", "a mask of zeros and ones")
    name = names.pop()
    axes = tuple(axis for axis in range(mask.rank) if axis != mask.axis % mask.rank)
    code = (
        f"{name}_of_hit = {name}.masked_fill("
        f"({name}.sum(dim={axes}, keepdim=True) > 0).logical_not(), 0)"
    )
    for part in ast.walk(loop):
        if isinstance(part, ast.Name) and part.id == name:
            part.id = f"{name}_of_hit"
    return ast.parse(code).body


def _expert_target(target: ast.expr) -> ast.expr:
    return target.elts[0] if isinstance(target, ast.Tuple) else target


def _with_body(node: ast.stmt, **bodies: list[ast.stmt]) -> ast.stmt:
    written = copy.copy(node)
    for name, body in bodies.items():
        setattr(written, name, body)
    return written


def _forget_bound(node: ast.stmt, choices: Choices) -> None:
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            choices.forget(part.id)
        elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
            choices.write(part)
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            _note_write(part, choices, discarded=False)


def _note_write(call: ast.Call, choices: Choices, discarded: bool) -> None:
    """Note what a call may write to: in place, or whatever it is given if its value is not used."""
    function = call.func
    in_place = isinstance(function, ast.Attribute) and function.attr.endswith("_")
    if discarded and in_place:
        return  # Choices.effect reads it
    if in_place and isinstance(function, ast.Attribute):
        choices.write(function.value)
    if in_place or discarded:
        for argument in call.args:
            choices.write(argument)
    for keyword in call.keywords:
        if keyword.arg == "out":
            choices.write(keyword.value)


def _asks_for_tokens(turn: Turn, refusal: Refusal) -> bool:
    """Whether a loop that cannot be lifted would have to be: dynamo breaks at such tests."""
    return bool(
        turn.values.tests or turn.values.parts or refusal.check in ("test", "slice", "order")
    )
