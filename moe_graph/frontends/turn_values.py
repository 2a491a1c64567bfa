"""Values of expressions in one turn of a loop, for an expert that no slot chose.

``value`` also looks at what every call does (``purity``), and notes where a node has to be written
in another way once the number of the expert is a plain number (``rewritten``).
"""

from __future__ import annotations

from moe_graph.frontends.turn_calls import Calls
from moe_graph.frontends.turn_index import Indexing


class TurnValues(Indexing, Calls):
    """Values of expressions; see ``turn_base`` for the attributes."""
