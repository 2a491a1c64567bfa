"""The error that every check of an op raises."""

from __future__ import annotations


class OpError(ValueError):
    """An op was given something that it cannot take.

    TorchAir raises what went wrong while it compiles again, as ``type(error)(text)``; an error made
    of a text alone keeps the text and has no fields.

    Attributes:
        op: GE type, for example ``"MoeInitRoutingV2"``.
        argument: IR name of the input or attribute at fault.
        got: what was given.
        want: what the op takes.
        hint: what the user can do, empty when nothing is known to help.
        product: the Ascend product whose limit this is (``"A2"``, ``"A3"``, ``"950"``), empty when
            it holds on every product.
    """

    def __init__(
        self,
        op: str,
        argument: str = "",
        *,
        got: object = "",
        want: object = "",
        hint: str = "",
        product: str = "",
    ) -> None:
        self.op = op if argument else ""
        self.argument = argument
        self.got = str(got)
        self.want = str(want)
        self.hint = hint
        self.product = product
        where = f" on {product}" if product else ""
        advice = f"; {hint}" if hint else ""
        text = f"{op}: {argument}: got {self.got}, want {self.want}{where}{advice}"
        super().__init__(text if argument else op)

    def __reduce__(self) -> tuple[object, ...]:
        if not self.argument:
            return OpError, self.args
        return _rebuild, (self.op, self.argument, self.got, self.want, self.hint, self.product)


def _rebuild(op: str, argument: str, got: str, want: str, hint: str, product: str) -> OpError:
    return OpError(op, argument, got=got, want=want, hint=hint, product=product)
