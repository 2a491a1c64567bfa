"""A number that an op is limited to: checked when it runs, printed in the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_graph.config import Soc
from moe_graph.ops.call import Call
from moe_graph.ops.dims import UNKNOWN, Dim, is_unknown, known_less

ALL_PRODUCTS = tuple(Soc)


@dataclass(frozen=True)
class Limit:
    """A range of one quantity of a call.

    Attributes:
        argument: IR name of the input or attribute at fault.
        what: the quantity, as it is printed: ``"K"``, ``"T * K"``, ``"dim 1 of x"``.
        value: the quantity of a call; None or -1 when this call has none or does not tell.
        source: where the limit comes from.
        low, high: bounds, inclusive.
        multiple_of: the quantity is divisible by this.
        one_of: the values that it may have.
        products: where the limit holds.
        hint: what a user can do.
    """

    argument: str
    what: str
    value: Callable[[Call], Dim | None]
    source: str
    low: int | None = None
    high: int | None = None
    multiple_of: int | None = None
    one_of: tuple[Any, ...] = ()
    products: tuple[Soc, ...] = ALL_PRODUCTS
    hint: str = ""

    def check(self, call: Call) -> None:
        """Raise when the quantity is known to be out of range; adds no guard on a symbol.

        Raises:
            OpError: it is.
        """
        if call.soc not in self.products:
            return
        value = self.value(call)
        if value is None or is_unknown(value) or self._may_hold(value):
            return
        raise call.error(
            self.argument, got=f"{self.what} = {value}", want=self.range, hint=self.hint, limit=True
        )

    def _may_hold(self, value: Dim) -> bool:
        too_low = self.low is not None and known_less(value, self.low)
        too_high = self.high is not None and known_less(self.high, value)
        if too_low or too_high:
            return False
        if not isinstance(value, int):
            return True
        divides = self.multiple_of is None or value % self.multiple_of == 0
        return divides and (not self.one_of or value in self.one_of)

    @property
    def range(self) -> str:
        """The range alone: ``"in [1, 512]"``, ``"<= 2048, a multiple of 32"``."""
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"in [{self.low}, {self.high}]")
        elif self.high is not None:
            parts.append(f"<= {self.high}")
        elif self.low is not None:
            parts.append(f">= {self.low}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        if self.one_of:
            parts.append("one of " + ", ".join(str(item) for item in self.one_of))
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.what} {self.range}"


def dim(argument: str, index: int) -> Callable[[Call], Dim]:
    """Return the quantity "dimension `index` of input `argument`", unknown when it is absent."""

    def value(call: Call) -> Dim:
        spec = getattr(call, argument)
        known = spec is not None and spec.rank_known and -len(spec.shape) <= index < len(spec.shape)
        return spec.shape[index] if known else UNKNOWN

    return value


def attribute(name: str) -> Callable[[Call], Any]:
    """Return the quantity "attribute `name`"."""
    return lambda call: getattr(call, name)
