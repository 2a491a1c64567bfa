"""Why a fact was not given: the check, what was found and wanted; text is made on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes.facts import Root
from moe_graph.provenance import source_line
from moe_graph.report import Reason

Text = str | Callable[[], str]


@dataclass(frozen=True, eq=False)
class Miss:
    """A check that failed where everything before it held.

    Attributes:
        check: stable name of the check.
        node: where it failed.
        root: the ids that the check was about, None when no root is involved yet.
        got: what was found; a callable is called when the text is asked for.
        want: what was wanted.
        hint: what the user can do.
    """

    check: str
    node: Node
    root: Root | None
    got: Text
    want: Text
    hint: str = ""

    def reason(self) -> Reason:
        """Return the miss as text for the report."""
        return Reason(
            self.check,
            self.node.name,
            source_line(self.node),
            _text(self.got),
            _text(self.want),
            self.hint,
        )


def _text(part: Text) -> str:
    return part if isinstance(part, str) else part()
