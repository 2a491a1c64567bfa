"""What is known of a value in a function that loops over experts.

Everything is said about one *choice*: which slots chose which expert, known by the name of the
tensor that holds the ids or the mask (``Key``: a name and how often it was bound). Within a loop
the values are those of one expert, under the assumption that no slot chose it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """Nothing is known."""


@dataclass(frozen=True)
class Named(Value):
    """A tensor, or the same elements in another shape."""

    key: Key


@dataclass(frozen=True, eq=False)
class Mask(Value):
    """Nonzero where a slot chose an expert; the experts lie along one axis.

    Attributes:
        key: the choice.
        axis: axis of the experts, from the front (0) or the last one (-1).
        rank: number of axes, None when unknown.
        signed: elements may be negative.
        classes: expression of the number of experts, None when unknown.
    """

    key: Key
    axis: int
    rank: int | None
    signed: bool = False
    classes: ast.expr | None = None


@dataclass(frozen=True, eq=False)
class Counts(Value):
    """How many slots chose each expert.

    Attributes:
        key: the choice.
        mask: the mask that was summed up, None for a bincount.
        tensor: expression of the counts as a tensor.
        size: expression of the number of experts, None when it is one more than the largest id.
        running: they are added up.
        positive: they are truths, not numbers: which experts were chosen at all.
        reads: what was known of the names in `tensor`.
    """

    key: Key
    mask: Mask | None
    tensor: ast.expr
    size: ast.expr | None = None
    reads: tuple[tuple[str, Value], ...] = ()
    running: bool = False
    positive: bool = False


@dataclass(frozen=True, eq=False)
class Hits(Value):
    """The experts that a slot chose, in ascending order.

    Attributes:
        counts: of which they are the places of the nonzero ones.
        element: what one of them is, see :class:`Expert`; or ``"table"``, when all of them are in
            the tuple that ``as_tuple=True`` gives.
    """

    counts: Counts
    element: str


@dataclass(frozen=True)
class Order(Value):
    """A permutation of the slots by expert, or a tensor with one row per slot in that order."""

    key: Key


@dataclass(frozen=True)
class Size(Value):
    """The size of one axis of a tensor."""

    key: Key
    axis: int


@dataclass(frozen=True)
class EmptyList(Value):
    """A list that was just made."""


@dataclass(frozen=True)
class Expert(Value):
    """Number of the expert that this turn of the loop is about.

    Attributes:
        form: ``"row"`` for a tensor of shape ``[1]``, ``"scalar"`` for one of shape ``[]``,
            ``"int"`` for a number.
    """

    form: str = "int"


@dataclass(frozen=True)
class Selection(Value):
    """Nonzero where a slot, or a token, chose this expert."""

    key: Key
    signed: bool = False


@dataclass(frozen=True)
class Rows(Value):
    """A tensor with no elements if no slot chose this expert, and some if one did.

    Attributes:
        leading: its first axis is the one without elements.
        counted: its first axis is as long as the number of slots that chose this expert.
        fresh: nothing else has its memory.
    """

    key: Key
    leading: bool = False
    counted: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class OfModules(Value):
    """What one of several modules returned for rows of this expert."""

    key: Key
    modules: tuple[Any, ...]


@dataclass(frozen=True)
class RowsTuple(Value):
    """Several of them.

    Attributes:
        counted: as for each of them.
    """

    key: Key
    counted: bool = False


@dataclass(frozen=True)
class Count(Value):
    """How many slots chose this expert, or a multiple of it."""

    key: Key


@dataclass(frozen=True)
class Truth(Value):
    """Whether a slot chose this expert, or the opposite."""

    key: Key
    when_empty: bool


@dataclass(frozen=True)
class Cursor(Value):
    """Where the rows of this expert begin among all rows in order, or where they end."""

    key: Key
    end: bool


@dataclass(frozen=True)
class Same(Value):
    """What a name stood for when this turn began, or equal to it."""

    name: str


@dataclass(frozen=True)
class Fresh(Value):
    """A tensor that was just made."""


@dataclass(frozen=True, eq=False)
class Static(Value):
    """An object that does not depend on the input: a module, a parameter, a number."""

    thing: Any


@dataclass(frozen=True, eq=False)
class OneOf(Value):
    """One of several modules, or parameters."""

    things: tuple[Any, ...]
