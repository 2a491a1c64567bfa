"""Why a loop is left as it is."""

from __future__ import annotations

import ast


class Refusal(Exception):  # noqa: N818  an answer, caught by whoever asked
    """A condition under which a loop may be lifted does not hold.

    Attributes:
        check: stable name of the condition.
        node: where it fails.
        got: what is there.
        want: what would be needed.
        hint: what the user can do.
    """

    def __init__(self, check: str, node: ast.AST, got: str, want: str, hint: str = "") -> None:
        super().__init__(f"{check}: got {got}, want {want}")
        self.check, self.node, self.got, self.want, self.hint = check, node, got, want, hint
