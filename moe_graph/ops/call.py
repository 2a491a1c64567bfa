"""One use of an op, as its shape rule and its kernel see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import UNKNOWN, Dim, may_equal
from moe_graph.ops.errors import OpError
from moe_graph.ops.ir import TensorSpec, show_shape

if TYPE_CHECKING:
    from moe_graph.ops.opdef import OpDef


class Call:
    """One use of an op: IR inputs and attributes as Python attributes, and the product.

    In a shape rule the inputs are :class:`TensorSpec`, in a kernel tensors; an optional input that
    is absent is None, a dynamic one is a list.

    Attributes:
        soc: the product.
        upstream: the shape rule is asked for the public answer, right or wrong.
    """

    upstream = False

    def __init__(
        self,
        opdef: OpDef,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        soc: Soc,
        memory: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.opdef = opdef
        self.soc = soc
        self._memory = memory
        values = self.__dict__
        for declared, value in zip(opdef.inputs, inputs, strict=True):
            values[declared.name] = value
        values.update(attrs)

    def __getattr__(self, name: str) -> Any:
        for attr in self.__dict__["opdef"].attrs:
            if attr.name == name:
                raise attr.missing(self.opdef.ge_type)
        raise AttributeError(f"{self.opdef.ge_type} has no input or attribute {name}")

    def new_output(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, index: int = 0
    ) -> torch.Tensor:
        """Return memory for all of output `index`: the caller's, if it fits, or else fresh."""
        offered = self._memory[index] if index < len(self._memory) else None
        if (
            offered is not None
            and offered.shape == torch.Size(shape)
            and offered.dtype is dtype
            and offered.is_contiguous()
        ):
            return offered
        return torch.empty(list(shape), dtype=dtype, device=device)

    def error(
        self, argument: str, *, got: object, want: object, hint: str = "", limit: bool = False
    ) -> OpError:
        """Return an error about `argument`; `limit` says that it is one of this product."""
        product = self.soc.value if limit else ""
        return OpError(self.opdef.ge_type, argument, got=got, want=want, hint=hint, product=product)

    def dims(self, argument: str, rank: int) -> tuple[Dim, ...]:
        """Return the `rank` dims of input `argument`, all unknown when its rank is.

        Raises:
            OpError: it has another rank.
        """
        spec: TensorSpec = self.__dict__[argument]
        if not spec.rank_known:
            return (UNKNOWN,) * rank
        if len(spec.shape) != rank:
            raise self.error(
                argument, got=f"shape {show_shape(spec.shape)}", want=f"{rank} dimensions"
            )
        return spec.shape

    def expect_equal(self, argument: str, got: Dim, want: Dim, meaning: str) -> None:
        """Raise unless `got` may equal `want`; `meaning` says what is compared.

        Raises:
            OpError: the two are known to differ.
        """
        if not may_equal(got, want):
            raise self.error(argument, got=f"{meaning} {got}", want=want)

    def expect_one_of(self, attribute: str, allowed: Sequence[int]) -> int:
        """Return the attribute, which must be one of `allowed`.

        Raises:
            OpError: it is none of them.
        """
        value: int = getattr(self, attribute)
        if value not in allowed:
            raise self.error(
                attribute, got=value, want="one of " + ", ".join(str(item) for item in allowed)
            )
        return value

    def expect_at_least(self, attribute: str, low: int) -> int:
        """Return the attribute, which must be `low` or more.

        Raises:
            OpError: it is less.
        """
        value: int = getattr(self, attribute)
        if value < low:
            raise self.error(attribute, got=value, want=f">= {low}")
        return value
