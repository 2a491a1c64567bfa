"""What an op is: its IR, its rules and its arithmetic, in one place.

An :class:`OpDef` is the only source for one GE op. The torch op and its fake kernel
(`torch_binding.py`), the GE lowering (`moe_graph/converters`), the checks of the emulator and the
documentation are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_graph.config import Soc
from moe_graph.ops.call import Call
from moe_graph.ops.dims import UNKNOWN, Dim, known_less, may_equal
from moe_graph.ops.errors import OpError
from moe_graph.ops.form import Form
from moe_graph.ops.ir import (
    REQUIRED,
    Attr,
    Input,
    Output,
    TensorSpec,
    dtype_name,
    show_shape,
)
from moe_graph.ops.limit import ALL_PRODUCTS, Limit
from moe_graph.ops.product import current_product

__all__ = [
    "REQUIRED",
    "Attr",
    "Autograd",
    "Call",
    "Form",
    "Input",
    "Limit",
    "OpDef",
    "Output",
    "Specs",
    "TensorSpec",
    "Tensors",
    "show_shape",
]


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
        compute: the kernel, a vectorised composition of PyTorch ops.
        naive: the definition, slow and plain, that `compute` is tested against.
        dtype_rule: what must hold of dtypes beyond the columns of the IR: beside which attributes,
            and which inputs, each is taken.
        tiling_rule: what must fit together when the op runs though infershape lets it pass.
        limits: ranges of sizes and attributes, checked when the op runs.
        infershape_checks_dtypes: False where GE's infershape does not look at the dtypes of the IR;
            they are checked when the op runs all the same.
        checked_outputs: outputs whose shape and dtype the op compares, when it runs, with what its
            caller has allocated; of a dimension that is a bound there may be more.
        unchecked_outputs: those of them that this call does not use, and the op does not compare.
        autograd: gradient of the torch op, None when it has none.
        no_gradient: why there is no gradient, for the error of a backward pass.
        forms: uses of the op whose shape rule the documentation prints.
        products: products that have the op.
        ge_products: products whose graph engine has this op type, where fewer than `products`.
        function: public function of ``moe_graph.ops`` that calls it, where there is one.
        doc: where the semantics come from.
    """

    ge_type: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attrs: tuple[Attr, ...]
    shape_rule: Callable[[Call], Specs]
    compute: Callable[[Call], Tensors]
    naive: Callable[[Call], Tensors]
    dtype_rule: Callable[[Call], None] = field(default=lambda call: None)
    tiling_rule: Callable[[Call], None] = field(default=lambda call: None)
    limits: tuple[Limit, ...] = ()
    infershape_checks_dtypes: bool = True
    checked_outputs: tuple[str, ...] = ()
    unchecked_outputs: Callable[[Call], tuple[str, ...]] = field(default=lambda call: ())
    autograd: Autograd | None = None
    no_gradient: str = ""
    forms: tuple[Form, ...] = ()
    products: tuple[Soc, ...] = ALL_PRODUCTS
    ge_products: tuple[Soc, ...] | None = None
    function: str = ""
    doc: str = ""

    def bind_attrs(self, given: Mapping[str, Any], *, complete: bool = True) -> dict[str, Any]:
        """Return every attribute: `given` where it has one, defaults elsewhere.

        Args:
            given: attributes by IR name.
            complete: False leaves out required ones that are not given: a shape rule may not read
                them.

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
        return {
            name: self._bind_attr(attr, given)
            for name, attr in known.items()
            if complete or name in given or attr.default is not REQUIRED
        }

    def _bind_attr(self, attr: Attr, given: Mapping[str, Any]) -> Any:
        if attr.name not in given:
            if attr.default is REQUIRED:
                raise attr.missing(self.ge_type)
            return attr.default
        value = given[attr.name]
        if attr.type == "ListInt" and isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
        if attr.type == "Float" and type(value) is int:
            value = float(value)
        is_bool_for_int = attr.type == "Int" and isinstance(value, bool)
        if not isinstance(value, attr.python_type) or is_bool_for_int:
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
        self,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        soc: Soc | None = None,
        *,
        upstream: bool = False,
    ) -> Specs:
        """Check dtypes and shapes as GE's infershape does and return the output specs.

        Args:
            inputs: TensorSpec, None (absent) or a list of TensorSpec (dynamic), in IR order;
                trailing optional inputs may be left out.
            attrs: every attribute, see :meth:`bind_attrs`.
            soc: product; None takes the current one.
            upstream: answer as the public rule does also where that is plainly wrong.

        Returns:
            One spec per output, None for an output that is not produced. A dynamic output, always
            the last, contributes one entry per tensor.

        Raises:
            OpError: see :class:`OpError`.
        """
        call = self._checked_call(inputs, attrs, soc)
        call.upstream = upstream
        if self.infershape_checks_dtypes:
            self._check_dtypes(call)
        return self.shape_rule(call)

    def infer(
        self,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        soc: Soc | None = None,
        *,
        outputs: Sequence[TensorSpec | None] | None = None,
    ) -> Specs:
        """:meth:`infer_shape`, and every check that the product makes when the op runs.

        Args:
            inputs: as for :meth:`infer_shape`.
            attrs: every attribute.
            soc: product; None takes the current one.
            outputs: what the caller has allocated for each output, checked where the op does.
        """
        call = self._checked_call(inputs, attrs, soc)
        self._check_dtypes(call)
        if call.soc not in self.products:
            raise call.error("op", got="this op", want=f"an op of {call.soc.value}")
        specs = self.shape_rule(call)
        self.tiling_rule(call)
        for limit in self.limits:
            limit.check(call)
        if outputs is not None:
            self._check_outputs(call, specs, outputs)
        return specs

    def require_in_graph_engine(self, soc: Soc) -> None:
        """Raise unless the graph engine of `soc` has this op type.

        Raises:
            OpError: it has not.
        """
        if soc not in (self.ge_products or self.products):
            raise OpError(
                self.ge_type,
                "op",
                got="this op type in a GE graph",
                want="an op type of its graph engine",
                product=soc.value,
            )

    def _check_outputs(
        self, call: Call, specs: Specs, allocated: Sequence[TensorSpec | None]
    ) -> None:
        checked = set(self.checked_outputs) - set(self.unchecked_outputs(call))
        for declared, spec, given in zip(self.outputs, specs, allocated, strict=False):
            if declared.name not in checked or spec is None:
                continue
            if given is None:
                if declared.required:
                    raise call.error(declared.name, got="nothing", want=spec)
                continue
            if spec.dtype != given.dtype or not _fits(spec, given.shape):
                raise call.error(declared.name, got=given, want=spec)

    def kernel(
        self,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        soc: Soc | None = None,
        memory: Sequence[torch.Tensor | None] = (),
    ) -> Tensors:
        """Compute the outputs of inputs that have passed :meth:`infer`.

        Args:
            inputs: as for :meth:`infer_shape`, with tensors for specs.
            attrs: every attribute.
            soc: product; None takes the current one.
            memory: per output, a tensor that it may be written to; it overlaps with no input.

        Returns:
            One tensor per output, None for one that is not produced. It is the one of `memory`
            where the kernel used that.

        Raises:
            OpError: a value is out of range (expert ids, row indices, group lists).
        """
        return self.compute(self._call(inputs, attrs, soc, memory))

    def reference(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None = None
    ) -> Tensors:
        """Compute the outputs as the definition reads, slowly. Same contract as :meth:`kernel`."""
        return self.naive(self._call(inputs, attrs, soc))

    def _call(
        self,
        inputs: Sequence[Any],
        attrs: Mapping[str, Any],
        soc: Soc | None,
        memory: Sequence[torch.Tensor | None] = (),
    ) -> Call:
        return Call(self, self._pad(inputs), attrs, soc or current_product(), memory)

    def _checked_call(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any], soc: Soc | None
    ) -> Call:
        call = self._call(inputs, attrs, soc)
        for declared in self.inputs:
            value = getattr(call, declared.name)
            if declared.kind == "required" and value is None:
                raise OpError(self.ge_type, declared.name, got="nothing", want="a tensor")
            if value is not None and not declared.exists_on(call.soc):
                raise call.error(declared.name, got="a tensor", want="nothing", limit=True)
            for spec in _specs_of(value):
                _check_dims(call, declared.name, spec)
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
        """Apply the dtype rule, and find a dtype column that all present inputs share."""
        self.dtype_rule(call)
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


def _fits(spec: TensorSpec, allocated: Sequence[Dim]) -> bool:
    """True unless `allocated` is known not to hold `spec`; of a bound there may be more."""
    if len(spec.shape) != len(allocated):
        return False
    return all(
        not known_less(given, wanted) if index in spec.bounds else may_equal(given, wanted)
        for index, (given, wanted) in enumerate(zip(allocated, spec.shape, strict=True))
    )


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
