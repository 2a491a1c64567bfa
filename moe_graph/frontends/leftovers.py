"""Who reads a name after a loop, and what no one reads once the loop is lifted."""

from __future__ import annotations

import ast
import copy
from collections import Counter

from moe_graph.frontends.purity import Reading
from moe_graph.frontends.refusal import Refusal


def read_after(tree: ast.FunctionDef, loop: ast.For) -> set[str]:
    """Return the names that may be read, as a loop leaves them, once the loop is over."""
    path = _path_to(tree.body, loop)
    read: set[str] = set()
    bound: set[str] = set()
    for block, place in reversed(path):
        outer = block[place]
        if outer is not loop and isinstance(outer, ast.For | ast.While):
            read |= _read(outer) - bound  # the next turn of the loop around
        for statement in block[place + 1 :]:
            read |= _exposed(statement, bound)
    return read


def _path_to(block: list[ast.stmt], loop: ast.For) -> list[tuple[list[ast.stmt], int]]:
    """Return the blocks around a loop, and the place of the loop in each, from the outside."""
    for place, statement in enumerate(block):
        if statement is loop:
            return [(block, place)]
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(statement, field, None)
            path = _path_to(inner, loop) if isinstance(inner, list) else []
            if path:
                return [(block, place), *path]
    return []


def _exposed(statement: ast.stmt, bound: set[str]) -> set[str]:
    """Return the names that a statement reads from before; adds to `bound` those it binds."""
    if isinstance(statement, ast.If):
        read = _read(statement.test) - bound
        branches = [set(bound), set(bound)]
        for branch, part in zip(branches, (statement.body, statement.orelse), strict=True):
            for inner in part:
                read |= _exposed(inner, branch)
        bound |= branches[0] & branches[1]
        return read
    if isinstance(statement, ast.With):
        read = set().union(*(_read(item.context_expr) for item in statement.items)) - bound
        for inner in statement.body:
            read |= _exposed(inner, bound)
        return read
    read = _read(statement) - bound
    if isinstance(statement, ast.Assign):
        bound |= {
            part.id
            for target in statement.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        }
    return read


def lists_are_concatenated(reading: Reading, loop: ast.For, lists: set[str]) -> None:
    """Check that lists to which every turn appends rows only become one tensor by rows.

    Raises:
        Refusal: a list has another use, so that rows of no length could matter.
    """
    tree = reading.source.tree
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    end = loop.end_lineno or loop.lineno
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node.id not in lists or node.lineno <= end:
            continue
        use = parents[id(node)]
        joined = isinstance(use, ast.Call) and is_concatenation(use)
        tested = isinstance(use, ast.IfExp | ast.If) and use.test is node
        if not joined and not tested:
            raise Refusal(
                "write",
                node,
                f"a use of {node.id} other than torch.cat by rows",
                "a list that becomes one tensor",
            )


def is_concatenation(call: ast.Call) -> bool:
    """Whether a call is ``torch.cat`` by rows."""
    return (
        isinstance(call.func, ast.Attribute | ast.Name)
        and ast.unparse(call.func).rpartition(".")[2] in ("cat", "concat", "concatenate")
        and all(ast.unparse(keyword.value) == "0" for keyword in call.keywords)
        and all(ast.unparse(arg) == "0" for arg in call.args[1:])
    )


def without_unread(tree: ast.FunctionDef, reading: Reading) -> ast.FunctionDef:
    """Return a function without assignments that only the loops of `reading` needed."""
    tree = copy.deepcopy(tree)
    fewer = Counter(_loads(reading.source.tree)) - Counter(_loads(tree))
    tree.body = _Cut(set(fewer), reading).block(tree.body, set())
    return tree


class _Cut:
    """Goes through statements from the last to the first, and leaves out what no one reads."""

    def __init__(self, names: set[str], reading: Reading) -> None:
        self._names = names
        self._reading = reading

    def block(self, statements: list[ast.stmt], live: set[str]) -> list[ast.stmt]:
        """Return the statements that are needed; `live` is read after them, then before them."""
        kept: list[ast.stmt] = []
        for statement in reversed(statements):
            if self._needed(statement, live):
                kept.append(statement)
        return kept[::-1]

    def _needed(self, node: ast.stmt, live: set[str]) -> bool:
        if isinstance(node, ast.If):
            after = [set(live), set(live)]
            node.body = self.block(node.body, after[0]) or [ast.copy_location(ast.Pass(), node)]
            node.orelse = self.block(node.orelse, after[1])
            live |= after[0] | after[1] | _read(node.test)
            return True
        if isinstance(node, ast.With):
            node.body = self.block(node.body, live)
            live |= set().union(*(_read(item.context_expr) for item in node.items))
            return bool(node.body)
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
            names = {part.id for part in node.targets if isinstance(part, ast.Name)}
            calls = (part for part in ast.walk(node.value) if isinstance(part, ast.Call))
            unread = not names & live and names <= self._names
            if unread and not any(map(self._reading.effect_of_call, calls)):
                self._names |= _read(node.value)
                return False
            live -= names
        live |= _read(node)
        return True


def _loads(tree: ast.AST) -> list[str]:
    return [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]


def _read(tree: ast.AST) -> set[str]:
    return set(_loads(tree))
