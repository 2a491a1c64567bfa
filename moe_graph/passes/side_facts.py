"""Facts that rules of their own read: dense experts, places of gates, experts that choose tokens.

All of them but :class:`DenseSum` are :class:`~moe_graph.passes.facts.Aside`: any other rule takes
such a tensor for one that nothing is known about.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from moe_graph.passes.facts import AboutRoot, Aside, Axis, Order


@dataclass(frozen=True, eq=False)
class SparseLogits(AboutRoot, Aside):
    """``[T, E]``: numbers at the experts of each token, ``-inf`` at the others."""


@dataclass(frozen=True, eq=False)
class Gates(AboutRoot, Aside):
    """Exactly zero but at the experts of each token.

    Attributes:
        table: the gates as ``[T, E]``.
        axes: what the first dimensions count; any others have length 1.
    """

    table: Node
    axes: tuple[Axis, ...] = (Axis.TOKEN, Axis.EXPERT)


@dataclass(frozen=True, eq=False)
class Dense(Aside):
    """A value of every token at every expert, computed from the token and the expert alone.

    Attributes:
        axes: what the first dimensions count.
        experts: number of experts.
        tokens: ``[T, H]`` that it is computed from.
        read_at: node that reads them.
        products: products with the matrix of each expert on the way.
        gates: what the tokens are multiplied with before the experts.
        weights: what the result of the experts is multiplied with.
        zero: it is zero where the gates are.
    """

    axes: tuple[Axis, ...]
    experts: int
    tokens: Node
    read_at: Node
    products: frozenset[Node] = frozenset()
    gates: Gates | None = None
    weights: Gates | None = None
    zero: bool = False


@dataclass(frozen=True, eq=False)
class DenseSum(AboutRoot):
    """The results of all experts, gated, summed over the experts: ``[T, H]``; `rows` are summed."""

    dense: Dense
    rows: Node
    weights: Gates | None


@dataclass(frozen=True, eq=False)
class GatePlaces(AboutRoot, Aside):
    """``[T * K, 2]``: token and expert of each gate that is not zero, by token."""


@dataclass(frozen=True, eq=False)
class SortedPlaces(AboutRoot, Aside):
    """The columns of :class:`GatePlaces`, each sorted on its own; the second is by `order`."""

    order: Order


@dataclass(frozen=True, eq=False)
class PlaceOfRow(AboutRoot, Aside):
    """Place among :class:`GatePlaces` of each row of `order`, in column 1 or alone."""

    order: Order
    alone: bool = False


@dataclass(frozen=True, eq=False)
class ChosenTokens(Aside):
    """``[E, C, H]``: tokens that each of E chooses among all, as `ids` ``[E, C]`` say."""

    ids: Node
