"""What a tensor means for routing: the abstract values that the rules hand to one another.

Every fact is about one :class:`Root`, a tensor of expert ids ``[..., K]``. Three layouts occur:

``TOKENS``  ``[..., K]``, one row per token
``SLOTS``   ``[T * K]``, slot ``t * K + k``
``ROWS``    ``[T * K]``, grouped by expert

A fact is a proof: a rule gives it only after it has compared the shapes and literals that it rests
on. Facts name nodes, never values, and hold no reference to the analysis that made them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from moe_graph.passes.meta import Dim, same_dim, same_shape


class Layout(enum.Enum):
    """Order of the elements of a tensor about slots."""

    TOKENS = "[..., K]"
    SLOTS = "[T * K] by token"
    ROWS = "[T * K] by expert"


@dataclass(frozen=True, eq=False)
class Root:
    """Expert ids as a router gives them.

    Attributes:
        ids: integer node ``[..., K]``.
        tokens: product of the leading dimensions, ``T``.
        top_k: last dimension, ``K``.
        bound: every id is in ``[0, bound)``; None when nothing proves a bound.
        distinct: no token has the same expert twice.
    """

    ids: Node
    tokens: Dim
    top_k: int
    bound: int | None
    distinct: bool

    @property
    def slots(self) -> Dim:
        """Number of slots, ``T * K``."""
        return self.tokens * self.top_k


@dataclass(frozen=True, eq=False)
class Fact:
    """Base of all facts."""


@dataclass(frozen=True, eq=False)
class Outputs(Fact):
    """The results of an op that returns a tuple."""

    facts: tuple[Fact | None, ...]


@dataclass(frozen=True, eq=False)
class Constant(Fact):
    """Every element is `value`; None stands for memory that was never written."""

    value: float | None


@dataclass(frozen=True, eq=False)
class Arange(Fact):
    """``0, 1, 2, ...`` over the first dimension."""


@dataclass(frozen=True, eq=False)
class TokenOfSlot(Fact):
    """``slot // top_k`` for every slot, in slot order."""

    top_k: int


@dataclass(frozen=True, eq=False)
class Repeated(Fact):
    """Rows of `source`, each `times` times in a row: one per slot. Node `read_at` reads them."""

    source: Node
    times: int
    read_at: Node


@dataclass(frozen=True, eq=False)
class Choice(Fact):
    """Indices into a dimension of length `bound`, before they are known to choose experts."""

    bound: int
    distinct: bool


@dataclass(frozen=True, eq=False)
class Aside(Fact):
    """Base of the facts that rules of their own read, and all others take for no fact."""


@dataclass(frozen=True, eq=False)
class AboutRoot(Fact):
    """Base of the facts that are about one root."""

    root: Root


@dataclass(frozen=True, eq=False)
class ExpertIds(AboutRoot):
    """The ids themselves, in any dtype that holds them exactly.

    Attributes:
        order: the permutation of ``ROWS``, None in the other layouts.
    """

    layout: Layout
    order: Order | None = None


@dataclass(frozen=True, eq=False)
class Order(AboutRoot):
    """Slot of each row: a permutation of the slots that groups them by ascending expert.

    Attributes:
        maker: node of the sort; two unstable sorts are two permutations.
        stable: ties are in slot order.
        grouped: False for the slots as they come: row ``t * K + k`` is slot ``t * K + k``, and a
            value has one leading dimension ``T * K`` or the two ``T, K``.
        expert: the rows are only those of this expert, as a loop over experts reads them.
    """

    maker: Node
    stable: bool
    grouped: bool = True
    expert: int | None = None

    def same(self, other: Order | None) -> bool:
        """Tell whether this is surely the same permutation as `other`."""
        if other is None or self.root is not other.root or self.grouped != other.grouped:
            return False
        if self.expert != other.expert:
            return False
        return not self.grouped or self.maker is other.maker or (self.stable and other.stable)

    def row_dims(self, dims: tuple[Dim, ...]) -> int:
        """Return how many leading dimensions of a value of all rows count these, 0 if none do."""
        if self.grouped:
            return min(len(dims), 1)
        if len(dims) > 1 and same_shape(dims[:2], (self.root.tokens, self.root.top_k)):
            return 2
        return 1 if dims and same_dim(dims[0], self.root.slots) else 0


def slot_order(root: Root) -> Order:
    """Return the order of the slots as they come."""
    return Order(root, root.ids, stable=False, grouped=False)


@dataclass(frozen=True, eq=False)
class Inverse(AboutRoot):
    """Row of each slot."""

    order: Order


@dataclass(frozen=True, eq=False)
class TokenOfRow(AboutRoot):
    """Token of each row."""

    order: Order


@dataclass(frozen=True, eq=False)
class Counts(AboutRoot):
    """Rows per expert, for experts ``0 .. experts - 1``."""

    experts: int


@dataclass(frozen=True, eq=False)
class Ends(AboutRoot):
    """Running sum of :class:`Counts`."""

    experts: int


@dataclass(frozen=True, eq=False)
class Grouped(AboutRoot):
    """A value per row, in the order of the rows; the row dimension is the first."""

    order: Order


@dataclass(frozen=True, eq=False)
class Rows(Grouped):
    """Rows of `source` ``[T, H]``, one per row: a dispatch, made by node `leaf`.

    Node `read_at` reads the source: `leaf`, or an earlier one that repeats it.
    """

    source: Node
    leaf: Node
    read_at: Node


@dataclass(frozen=True, eq=False)
class RowsBehindOne(AboutRoot):
    """Rows of `source` behind a dimension of length 1, ``[1, R, H]``; `read_at` gathers them."""

    order: Order
    source: Node
    read_at: Node


@dataclass(frozen=True, eq=False)
class PerSlot(Grouped):
    """Values of `source` (first dimension ``T * K``, slot order), one per row, made by `leaf`.

    Attributes:
        by_expert: `source` is ``[T, E]``; a row has the value of its token and its expert.
    """

    source: Node
    leaf: Node
    by_expert: bool = False


@dataclass(frozen=True, eq=False)
class PerExpert(Grouped):
    """Rows of `table` ``[E, ...]``, one per row, by the expert of the row, made by `leaf`."""

    table: Node
    leaf: Node


@dataclass(frozen=True, eq=False)
class CountOf(AboutRoot):
    """Rows of one expert, as a tensor of one element or as a number."""

    expert: int


@dataclass(frozen=True, eq=False)
class Part(Grouped):
    """The rows of one expert out of grouped rows `source`, as a split by counts makes it."""

    source: Node
    leaf: Node


@dataclass(frozen=True, eq=False)
class RowWise(Grouped):
    """Computed row by row, from the row and its expert only.

    Attributes:
        leaves: the dispatches and other grouped values that it is computed from.
        products: the grouped products that it is computed from.
    """

    leaves: frozenset[Node]
    products: frozenset[Node]


@dataclass(frozen=True, eq=False)
class Joined(RowWise):
    """Rows of all experts out of one body per expert, one behind another.

    Attributes:
        parts: what each expert's body yields, by expert.
    """

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Contribution:
    """What the slots add to their tokens: rows of the experts, times one weight per slot.

    Attributes:
        body: the fact of the rows, before the weights.
        rows: their node.
        rows_at: node that reads them.
        weights: ``T * K`` weights in slot order, of any shape, or None.
        weights_at: node that reads the weights.
        weight_dtype: dtype of the weights as they multiply the rows.
        weights_by_expert: `weights` are ``[T, E]``.
    """

    body: RowWise
    rows: Node
    rows_at: Node
    weights: Node | None = None
    weights_at: Node | None = None
    weight_dtype: torch.dtype | None = None
    weights_by_expert: bool = False


@dataclass(frozen=True, eq=False)
class Weighted(RowWise):
    """A contribution in the order of the rows."""

    contribution: Contribution


@dataclass(frozen=True, eq=False)
class Unpermuted(AboutRoot):
    """A contribution in slot order, ``[T * K, H]`` or ``[..., K, H]``."""

    contribution: Contribution


@dataclass(frozen=True, eq=False)
class Combined(AboutRoot):
    """A contribution summed over the slots of each token: ``[T, H]``.

    Attributes:
        base: tensor that the rows are added onto, None for zeros.
    """

    contribution: Contribution
    base: Node | None = None


class Axis(enum.Enum):
    """What a dimension of a mask or of a one-hot tensor counts."""

    TOKEN = "T"
    CHOICE = "K"
    SLOT = "T * K"
    ROW = "T * K by expert"
    EXPERT = "E"
    PAIR = "E * T"
    ONE = "1"


@dataclass(frozen=True, eq=False)
class Masks(AboutRoot):
    """1 at the expert of each slot, or at all experts of a token, by what its axes count."""

    axes: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class FlatMap(AboutRoot):
    """A routing map ``[E, T]`` in one dimension."""


@dataclass(frozen=True, eq=False)
class SortedMap(AboutRoot):
    """Places in a :class:`FlatMap`, those of its ones first; `order` is that of the ones."""

    order: Order


@dataclass(frozen=True, eq=False)
class PlacesInMap(AboutRoot):
    """Place ``e * T + t`` of each row in a :class:`FlatMap`."""

    order: Order


@dataclass(frozen=True, eq=False)
class ScatteredWeights(AboutRoot):
    """Zeros ``[T, E]`` with the weights ``[T, K]`` of a node at the experts of each token."""

    weights: Node


@dataclass(frozen=True, eq=False)
class Hit(AboutRoot):
    """Mask of the slots, or of the tokens, that chose one expert."""

    expert: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class HitTable(AboutRoot):
    """Where a :class:`Hit` is true, one row of indices per place."""

    order: Order
    axes: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class ChoiceOfRow(AboutRoot):
    """Which of the K choices of its token each row is."""

    order: Order


@dataclass(frozen=True, eq=False)
class Unrolled(Contribution):
    """What E bodies contribute, one for the rows of each expert.

    `body`, `rows` and `rows_at` are those of expert 0; weights are what all of them multiply with.

    Attributes:
        shares: contribution of each expert, by expert.
    """

    shares: tuple[Contribution, ...] = ()


@dataclass(frozen=True, eq=False)
class Gathering(AboutRoot):
    """Some experts' contributions: added by token, or put at their slots.

    Attributes:
        shares: contribution of each expert so far.
        by_slot: the rows are put at their slots, ``[T * K, H]``; else added by token, ``[T, H]``.
        base: tensor that the rows are added onto, None for zeros.
    """

    shares: Mapping[int, Contribution]
    by_slot: bool
    base: Node | None = None


@dataclass(frozen=True, eq=False)
class WeightsOfSlots(AboutRoot):
    """The weight matrix of the expert of each slot, gathered: ``[T * K, ...]`` or ``[T, K, ...]``.

    Attributes:
        table: weights of all experts ``[E, ., .]``.
        read_at: node that gathers them.
        transposed: the two last dimensions are swapped against `table`.
    """

    table: Node
    read_at: Node
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class SlotProduct(RowWise):
    """A product of each slot's row with the matrix of its expert, in slot order.

    Attributes:
        weights: the gathered matrices.
        rows: operand with the rows, or the tokens that every slot reads its row from.
        transposed: the rows multiply the matrix of `weights.table` with its dimensions swapped.
        tokens: ``[T, H]`` that the rows are copies of, None for rows that are computed.
        read_at: node that reads `tokens`.
    """

    weights: WeightsOfSlots
    rows: Node
    transposed: bool
    tokens: Node | None = None
    read_at: Node | None = None
