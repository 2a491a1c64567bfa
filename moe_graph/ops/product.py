"""Which Ascend product the ops are checked for and imitate, where no caller names one.

A fake kernel runs inside ``torch.compile`` and cannot be handed a setting; the backend puts the
product of its Config here while it compiles.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from moe_graph.config import Soc
from moe_graph.device import machine_product

_product: contextvars.ContextVar[Soc | None] = contextvars.ContextVar(
    "moe_graph_product", default=None
)


def current_product() -> Soc:
    """Return the product set by :func:`use_product`, else the product of this machine."""
    return _product.get() or machine_product()


@contextlib.contextmanager
def use_product(soc: Soc) -> Iterator[None]:
    """Check ops for `soc` inside the ``with`` block (this thread or task only)."""
    token = _product.set(soc)
    try:
        yield
    finally:
        _product.reset(token)
