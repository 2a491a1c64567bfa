"""The one exception of the engine: which GE node failed, where it came from, and why."""

from __future__ import annotations


class GraphError(RuntimeError):
    """A GE graph that the engine refuses or cannot execute.

    The text is what a user reads, since TorchAir passes it on as the message of its own error.

    Attributes:
        op: GE op type, empty when the error is about the graph as a whole.
        node: name of the GE node.
        fx: FX node and target that the GE node came from, for example ``"mm_1 (aten.mm.default)"``.
        argument: input, output or attribute that is wrong, empty when there is no single one.
        got: what was found.
        want: what is needed, empty when `got` says it all.
        hint: what to do about it.
    """

    def __init__(
        self,
        got: str,
        *,
        op: str = "",
        node: str = "",
        fx: str = "",
        argument: str = "",
        want: str = "",
        hint: str = "",
    ) -> None:
        self.op, self.node, self.fx = op, node, fx
        self.argument, self.got, self.want, self.hint = argument, got, want, hint
        where = (
            f"GE op {op} (node {node}" + (f", from FX node {fx})" if fx else ")")
            if op
            else "GE graph"
        )
        what = f"{argument}: got {got}" if argument else got
        super().__init__(
            f"{where}: {what}" + (f", want {want}" if want else "") + (f"; {hint}" if hint else "")
        )


class KernelError(ValueError):
    """Raised by a kernel about one of its arguments; the executor adds node and FX node.

    Attributes:
        argument: GE name of the input or attribute.
        got: what was found.
        want: what the op needs.
    """

    def __init__(self, argument: str, got: object, want: str) -> None:
        self.argument, self.got, self.want = argument, str(got), want
        super().__init__(f"{argument}: got {got}, want {want}")
