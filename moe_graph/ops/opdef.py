"""What an op is: its IR, its rules and its arithmetic, in one place.

An :class:`OpDef` is the only source for one GE op. The torch op and its fake kernel
(`torch_binding.py`), the GE lowering (`moe_graph/converters`), the checks of the emulator and the
documentation are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from moe_graph.config import Soc
from moe_graph.ops.dims import UNKNOWN, UNKNOWN_RANK, Dim, may_equal
from moe_graph.ops.errors import OpError
from moe_graph.ops.product import current_product

InputKind = Literal["required", "optional", "dynamic"]
AttrType = Literal["Int", "Bool", "Float", "Str", "ListInt"]

REQUIRED: Final = object()
"""Default of an attribute that has none."""

_PYTHON_TYPES: Final[dict[AttrType, type]] = {
    "Int": int,
    "Bool": bool,
    "Float": float,
    "Str": str,
    "ListInt": tuple,
}
_GE_VALUE_TYPES: Final[dict[AttrType, str]] = {
    "Int": "VT_INT",
    "Bool": "VT_BOOL",
    "Float": "VT_FLOAT",
    "Str": "VT_STRING",
    "ListInt": "VT_LIST_INT",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; ``shape == (-2,)`` is an unknown rank."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def rank_known(self) -> bool:
        """False for a tensor of unknown rank."""
        return not (
            len(self.shape) == 1
            and isinstance(self.shape[0], int)
            and self.shape[0] == UNKNOWN_RANK[0]
        )

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a real or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{show_shape(self.shape)}"


def show_shape(shape: Sequence[Dim]) -> str:
    """Return a shape as users write it: ``[8, s0, 4]``."""
    return "[" + ", ".join(str(dim) for dim in shape) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Input:
    """An input of the IR.

    Attributes:
        name: IR name.
        dtypes: one entry for each supported combination of dtypes ("column"), aligned over the
            inputs of an op; a single entry stands for every column.
        kind: ``"dynamic"`` is a list of tensors.
        dtypes_950: the columns on Ascend 950, where they differ.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    kind: InputKind = "required"
    dtypes_950: tuple[torch.dtype, ...] | None = None

    def columns(self, soc: Soc) -> tuple[torch.dtype, ...]:
        """Return the columns of this input on `soc`."""
        if soc is Soc.ASCEND950 and self.dtypes_950 is not None:
            return self.dtypes_950
        return self.dtypes


@dataclass(frozen=True)
class Output:
    """An output of the IR.

    Attributes:
        name: IR name.
        required: False when some attributes make the op leave it out.
        dtype: dtype of the output, None when it follows an input.
        dynamic: a list of tensors; only the last output may be one.
    """

    name: str
    required: bool = True
    dtype: torch.dtype | None = None
    dynamic: bool = False


@dataclass(frozen=True)
class Attr:
    """An attribute of the IR; `default` is :data:`REQUIRED` when it has none."""

    name: str
    type: AttrType
    default: Any = REQUIRED

    @property
    def ge_value_type(self) -> str:
        """GE's name of the value type, for example ``"VT_LIST_INT"``."""
        return _GE_VALUE_TYPES[self.type]


class Call:
    """One use of an op: IR inputs and attributes as Python attributes, and the product.

    In a shape rule the inputs are :class:`TensorSpec`, in a kernel tensors; an optional input that
    is absent is None, a dynamic one is a list.
    """

    def __init__(
        self, opdef: OpDef, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc
    ) -> None:
        self.opdef = opdef
        self.soc = soc
        self._values: dict[str, Any] = {
            declared.name: value for declared, value in zip(opdef.inputs, inputs, strict=True)
        }
        self._values.update(attrs)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"{self.opdef.ge_type} has no input or attribute {name}") from None

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
        spec: TensorSpec = self._values[argument]
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
        value: int = self._values[attribute]
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
        value: int = self._values[attribute]
        if value < low:
            raise self.error(attribute, got=value, want=f">= {low}")
        return value


@dataclass(frozen=True)
class Autograd:
    """Gradient of an op's torch form.

    Attributes:
        save: ``save(ctx, arguments, outputs)`` keeps what `backward` needs
            (``ctx.save_for_backward``); `arguments` has those of the torch op as attributes.
        backward: ``backward(ctx, *output_grads)`` returns gradients by IR input name; inputs that
            it leaves out get none. It may use only ops that have a TorchAir converter.
    """

    save: Callable[[Any, Any, tuple[torch.Tensor, ...]], None]
    backward: Callable[..., dict[str, torch.Tensor | None]]


Specs = list[TensorSpec | None]
Tensors = list[torch.Tensor | None]


@dataclass(frozen=True)
class OpDef:
    """One GE op.

    Attributes:
        ge_type: GE op type.
        inputs, outputs, attrs: the IR, in order.
        shape_rule: GE's infershape: its checks, then one spec per output (None: not produced).
        limits: what the op checks when it runs but infershape lets pass (tiling).
        compute: the kernel, a vectorised composition of PyTorch ops.
        naive: the definition, slow and plain, that `compute` is tested against.
        autograd: gradient of the torch op, None when it has none.
        doc: where the semantics come from.
    """

    ge_type: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attrs: tuple[Attr, ...]
    shape_rule: Callable[[Call], Specs]
    compute: Callable[[Call], Tensors]
    naive: Callable[[Call], Tensors]
    limits: Callable[[Call], None] = field(default=lambda call: None)
    autograd: Autograd | None = None
    doc: str = ""

    def bind_attrs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every attribute: `given` where it has one, defaults elsewhere.

        Raises:
            OpError: an unknown name, a wrong type, or a required attribute is missing.
        """
        known = {attr.name: attr for attr in self.attrs}
        for name in given:
            if name not in known:
                raise OpError(
                    self.ge_type,
                    name,
                    got="an attribute of this name",
                    want="one of " + ", ".join(known),
                )
        return {name: self._bind_attr(attr, given) for name, attr in known.items()}

    def _bind_attr(self, attr: Attr, given: Mapping[str, Any]) -> Any:
        if attr.name not in given:
            if attr.default is REQUIRED:
                raise OpError(self.ge_type, attr.name, got="nothing", want=f"{attr.type} value")
            return attr.default
        value = given[attr.name]
        if attr.type == "ListInt" and isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
        if attr.type == "Float" and type(value) is int:
            value = float(value)
        is_bool_for_int = attr.type == "Int" and isinstance(value, bool)
        if not isinstance(value, _PYTHON_TYPES[attr.type]) or is_bool_for_int:
            raise OpError(
                self.ge_type,
                attr.name,
                got=f"{value!r} ({type(value).__name__})",
                want=attr.type,
                hint="a GE attribute is a constant of the graph; it cannot depend on a dynamic size"
                if isinstance(value, torch.SymInt)
                else "",
            )
        return value

    def infer_shape(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None = None
    ) -> Specs:
        """Check dtypes and shapes as GE's infershape does and return the output specs.

        Args:
            inputs: TensorSpec, None (absent) or a list of TensorSpec (dynamic), in IR order;
                trailing optional inputs may be left out.
            attrs: every attribute, see :meth:`bind_attrs`.
            soc: product; None takes the current one.

        Returns:
            One spec per output, None for an output that is not produced. A dynamic output, always
            the last, contributes one entry per tensor.

        Raises:
            OpError: see :class:`OpError`.
        """
        return self.shape_rule(self._checked_call(inputs, attrs, soc))

    def infer(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None = None
    ) -> Specs:
        """:meth:`infer_shape`, and every limit of the product that is checked when the op runs."""
        call = self._checked_call(inputs, attrs, soc)
        specs = self.shape_rule(call)
        self.limits(call)
        return specs

    def kernel(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None = None
    ) -> Tensors:
        """Compute the outputs of inputs that have passed :meth:`infer`.

        Raises:
            OpError: a value is out of range (expert ids, row indices, group lists).
        """
        return self.compute(self._call(inputs, attrs, soc))

    def reference(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None = None
    ) -> Tensors:
        """Compute the outputs as the definition reads, slowly. Same contract as :meth:`kernel`."""
        return self.naive(self._call(inputs, attrs, soc))

    def _call(self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None) -> Call:
        return Call(self, self._pad(inputs), attrs, soc or current_product())

    def _checked_call(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None
    ) -> Call:
        call = self._call(inputs, attrs, soc)
        for declared in self.inputs:
            value = getattr(call, declared.name)
            if declared.kind == "required" and value is None:
                raise OpError(self.ge_type, declared.name, got="nothing", want="a tensor")
            for spec in _specs_of(value):
                _check_dims(call, declared.name, spec)
        self._check_dtypes(call)
        return call

    def _pad(self, inputs: Sequence[Any]) -> list[Any]:
        if len(inputs) > len(self.inputs):
            raise OpError(
                self.ge_type,
                "inputs",
                got=f"{len(inputs)} inputs",
                want="at most " + str(len(self.inputs)),
            )
        padded = list(inputs) + [None] * (len(self.inputs) - len(inputs))
        return [
            _given(value) if declared.kind == "dynamic" else value
            for declared, value in zip(self.inputs, padded, strict=True)
        ]

    def _check_dtypes(self, call: Call) -> None:
        """Find a dtype column that all present inputs share."""
        soc = call.soc
        width = max(len(declared.columns(soc)) for declared in self.inputs)
        columns = list(range(width))
        for declared in self.inputs:
            entries = declared.columns(soc)
            entries = entries * width if len(entries) == 1 else entries
            for spec in _specs_of(getattr(call, declared.name)):
                if spec.dtype not in entries:
                    raise call.error(
                        declared.name,
                        got=dtype_name(spec.dtype),
                        want=_names(entries),
                        limit=True,
                    )
                left = [column for column in columns if entries[column] == spec.dtype]
                if not left:
                    raise call.error(
                        declared.name,
                        got=dtype_name(spec.dtype),
                        want=_names([entries[column] for column in columns])
                        + " beside the dtypes of the inputs before it",
                        limit=True,
                    )
                columns = left


def _given(dynamic: Sequence[Any] | None) -> list[Any]:
    """Return the tensors of a dynamic input; a single empty ``[0]`` stands for none, as in GE."""
    tensors = list(dynamic or ())
    if len(tensors) == 1 and len(tensors[0].shape) == 1:
        (size,) = tensors[0].shape
        if isinstance(size, int) and size == 0:
            return []
    return tensors


def _specs_of(value: Any) -> list[TensorSpec]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))


def _check_dims(call: Call, argument: str, spec: TensorSpec) -> None:
    if not spec.rank_known:
        return
    for dim in spec.shape:
        if isinstance(dim, int) and dim < UNKNOWN:
            raise call.error(
                argument, got=f"shape {show_shape(spec.shape)}", want="dimensions >= -1"
            )
