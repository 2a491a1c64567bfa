"""Names, kinds and dtypes of the inputs, outputs and attributes of GE ops.

The ops of this project answer from their OpDef. Every other op answers from the prototype that
TorchAir ships as the docstring of its generated function, for example::

    REG_OP(MaskedFill)
        .INPUT(x, TensorType({DT_FLOAT, DT_BF16}))
        .INPUT(mask, TensorType({DT_BOOL}))
        .OUTPUT(y, TensorType({DT_FLOAT, DT_BF16}))
        .ATTR(keep_dims, Bool, false)
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

import torch

from moe_graph.emulator.engine import dtypes

_FIELD = re.compile(
    r"\.(?P<macro>(?:OPTIONAL_|DYNAMIC_)?INPUT|(?:DYNAMIC_)?OUTPUT|(?:REQUIRED_)?ATTR|DATATYPE)"
    r"\(\s*(?P<name>\w+)\s*,\s*(?P<rest>.*)",
)
_ATTR_KINDS = {
    "Int": "VT_INT",
    "Float": "VT_FLOAT",
    "Bool": "VT_BOOL",
    "String": "VT_STRING",
    "Type": "VT_DATA_TYPE",
    "Tensor": "VT_TENSOR",
    "ListInt": "VT_LIST_INT",
    "ListFloat": "VT_LIST_FLOAT",
    "ListBool": "VT_LIST_BOOL",
    "ListString": "VT_LIST_STRING",
    "ListType": "VT_LIST_DATA_TYPE",
    "ListListInt": "VT_LIST_LIST_INT",
    "ListListFloat": "VT_LIST_LIST_FLOAT",
}


@dataclass(frozen=True)
class Argument:
    """An input; `kind` is ``required``, ``optional`` or ``dynamic``, `dtypes` None allows any."""

    name: str
    kind: str
    dtypes: frozenset[torch.dtype] | None
    symbol: str = ""  # arguments with the same type symbol ("T") must have the same dtype


@dataclass(frozen=True)
class IrDefinition:
    """Prototype of a GE op, in the form in which GE reports it.

    Attributes:
        inputs: (name, ``"required" | "optional" | "dynamic"``) in order.
        outputs: (name, kind) in order.
        attrs: (name, ``"VT_INT"`` and so on) in order.
        input_arguments: the same inputs with their dtypes.
    """

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attrs: tuple[tuple[str, str], ...]
    input_arguments: tuple[Argument, ...]

    def argument(self, port_name: str) -> Argument | None:
        """Return the input that a node's port belongs to (``x2`` of a dynamic ``x``)."""
        for argument in self.input_arguments:
            if argument.kind == "dynamic":
                if (
                    port_name.startswith(argument.name)
                    and port_name[len(argument.name) :].isdigit()
                ):
                    return argument
            elif argument.name == port_name:
                return argument
        return None


@functools.cache
def definition(op_type: str) -> IrDefinition | None:
    """Return the prototype of a GE op, None when neither an OpDef nor TorchAir has one."""
    return _from_opdef(op_type) or _from_torchair(op_type)


def _from_opdef(op_type: str) -> IrDefinition | None:
    from moe_graph.ops import registry

    opdef = registry.find(op_type)
    if opdef is None:
        return None
    # dtypes None: OpDef.infer checks them, per product
    inputs = tuple(Argument(each.name, each.kind, None) for each in opdef.inputs)
    return IrDefinition(
        inputs=tuple((each.name, each.kind) for each in inputs),
        outputs=tuple(
            (each.name, "dynamic" if each.dynamic else "required") for each in opdef.outputs
        ),
        attrs=tuple((each.name, each.ge_value_type) for each in opdef.attrs),
        input_arguments=inputs,
    )


def _from_torchair(op_type: str) -> IrDefinition | None:
    from torchair._ge_concrete_graph import auto_generated_ge_raw_ops, ge_apis

    # ops with dynamic outputs are generated under a private name and wrapped by hand
    functions = (
        getattr(auto_generated_ge_raw_ops, f"_{op_type}", None),
        getattr(ge_apis, op_type, None),
    )
    texts = [text for function in functions if (text := getattr(function, "__doc__", None))]
    prototypes = [parse_prototype(text) for text in texts if "REG_OP(" in text]
    return _merged(op_type, prototypes) if prototypes else None


#: dtypes that an op takes although its prototype in TorchAir leaves them out: TorchAir's own tests
#: use them (declare_supported), or the documentation of the aclnn function lists them.
_ALSO: dict[str, frozenset[torch.dtype]] = {
    "Conv2DTranspose": frozenset({torch.float32}),
    "Conv3DTranspose": frozenset({torch.float32}),
    "FlashAttentionScore": frozenset({torch.float32}),
    "FlashAttentionScoreGrad": frozenset({torch.float32}),
    "ForeachAddScalarList": frozenset({torch.int64}),
    "ForeachDivScalarList": frozenset({torch.int64}),
    "ForeachMaximumScalarList": frozenset({torch.int64}),
    "ForeachMinimumScalarList": frozenset({torch.int64}),
    "ForeachMulScalarList": frozenset({torch.int64}),
    "ForeachRoundOffNumber": frozenset({torch.int8}),
    "ForeachSubScalarList": frozenset({torch.int64}),
    "Minimum": frozenset({torch.int8, torch.bool}),
    "NLLLoss": dtypes.HALF,
    "NLLLossGrad": dtypes.HALF,
    "ThresholdGradV2D": frozenset({torch.float32}),
    "TopKV2": frozenset({torch.int64}),
}


def _merged(op_type: str, prototypes: list[IrDefinition]) -> IrDefinition:
    """Return the first prototype, with the dtypes that the others or :data:`_ALSO` add."""
    first, *others = prototypes
    arguments = []
    for position, argument in enumerate(first.input_arguments):
        allowed = argument.dtypes
        if allowed is not None:
            for other in others:
                if position < len(other.input_arguments):
                    allowed |= other.input_arguments[position].dtypes or frozenset()
            allowed |= _ALSO.get(op_type, frozenset())
        arguments.append(replace(argument, dtypes=allowed))
    return replace(first, input_arguments=tuple(arguments))


def parse_prototype(text: str) -> IrDefinition:
    """Parse a ``REG_OP`` prototype, one macro per line."""
    symbols: dict[str, frozenset[torch.dtype] | None] = {}
    inputs: list[tuple[str, str, str]] = []
    outputs: list[tuple[str, str]] = []
    attrs: list[tuple[str, str]] = []
    for statement in _statements(text):
        match = _FIELD.match(statement)
        if match is None:
            continue
        macro, name, rest = match["macro"], match["name"], match["rest"]
        kind = (
            "optional" if "OPTIONAL" in macro else "dynamic" if "DYNAMIC" in macro else "required"
        )
        if macro.endswith("INPUT"):
            inputs.append((name, kind, rest))
        elif macro.endswith("OUTPUT"):
            outputs.append((name, kind))
        elif macro == "DATATYPE":
            symbols[name] = _dtypes(rest)
        else:
            attrs.append((name, _ATTR_KINDS.get(re.split(r"\W", rest)[0], "VT_INT")))
    arguments = tuple(_argument(name, kind, rest, symbols) for name, kind, rest in inputs)
    return IrDefinition(
        tuple((each.name, each.kind) for each in arguments), tuple(outputs), tuple(attrs), arguments
    )


def _statements(text: str) -> list[str]:
    joined = re.sub(r"\s+", " ", text.replace("\\n", " "))
    return [part.strip() for part in re.split(r"(?=\.(?:[A-Z_]+)\()", joined)]


def _argument(
    name: str, kind: str, rest: str, symbols: dict[str, frozenset[torch.dtype] | None]
) -> Argument:
    symbol = re.match(r'"(\w+)"', rest)
    if symbol:
        return Argument(name, kind, symbols.get(symbol[1]), symbol[1])
    return Argument(name, kind, _dtypes(rest))


def _dtypes(text: str) -> frozenset[torch.dtype] | None:
    """Return the dtypes of ``TensorType({DT_X, Class()})`` or ``TensorType::Class()``.

    The prototypes that TorchAir ships are older than bf16 support: bf16 is taken to be allowed
    wherever fp16 is. None stands for any dtype.
    """
    found: set[torch.dtype] = set()
    for name in re.findall(r"(\w+)\(\)", text):
        found |= dtypes.TYPE_CLASSES.get(name, frozenset())
    found |= {
        dtype
        for name in re.findall(r"DT_\w+", text)
        if (dtype := dtypes.from_name(name)) is not None
    }
    if torch.float16 in found:
        found.add(torch.bfloat16)
    return frozenset(found) or None
