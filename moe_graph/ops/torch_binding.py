"""Make the torch op of an OpDef: schema, fake kernel, eager kernel and autograd.

    OpDef("MoeInitRoutingV2", inputs x, expert_idx; attrs active_num=0, ...)
becomes
    moe_graph::moe_init_routing_v2(Tensor x, Tensor expert_idx, int active_num=0, ...)
        -> (Tensor, Tensor, Tensor, Tensor)

Arguments are the IR inputs in order, then the IR attributes. Every IR output is returned; one that
the attributes switch off is an empty tensor ``[0]`` of its dtype.

The eager kernel is registered for CompositeExplicitAutograd: it is a composition of PyTorch ops and
runs on whatever device the tensors are on. A device may register its own kernel over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_graph.ops.checks_once import ChecksOnce, specs_of
from moe_graph.ops.opdef import REQUIRED, Attr, Autograd, Input, OpDef, TensorSpec
from moe_graph.ops.product import current_product

NAMESPACE = "moe_graph"

_library: Any = torch.library.Library(NAMESPACE, "DEF")
_SCHEMA_TYPES = {"Int": "int", "Bool": "bool", "Float": "float", "Str": "str", "ListInt": "int[]"}
_INPUT_TYPES = {"required": "Tensor", "optional": "Tensor?", "dynamic": "Tensor[]"}


def torch_name(ge_type: str) -> str:
    """Return the torch name of a GE type: ``"MoeGatingTopK"`` -> ``"moe_gating_top_k"``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", ge_type).lower()


def bind(opdef: OpDef) -> Any:
    """Define the torch op of `opdef` and return it."""
    return define(torch_name(opdef.ge_type), schema_of(opdef), opdef, _IrArguments(opdef))


def schema_of(opdef: OpDef) -> str:
    """Return the argument list and results of the torch op as an ATen schema, without a name."""
    arguments: list[str] = []
    defaults_allowed = True
    # From the back: an optional input gets a default only if nothing after it is without one.
    in_order: list[Input | Attr] = [*opdef.inputs, *opdef.attrs]
    for argument in reversed(in_order):
        if isinstance(argument, Attr):
            text = f"{_SCHEMA_TYPES[argument.type]} {argument.name}"
            if argument.default is REQUIRED:
                defaults_allowed = False
            else:
                text += f"={_literal(argument.default)}"
        else:
            text = f"{_INPUT_TYPES[argument.kind]} {argument.name}"
            if argument.kind != "optional":
                defaults_allowed = False
            elif defaults_allowed:
                text += "=None"
        arguments.append(text)
    results = ["Tensor[]" if output.dynamic else "Tensor" for output in opdef.outputs]
    returns = results[0] if len(results) == 1 else "(" + ", ".join(results) + ")"
    return f"({', '.join(reversed(arguments))}) -> {returns}"


def define(
    name: str,
    schema: str,
    opdef: OpDef,
    to_ir: Callable[[Sequence[Any], dict[str, Any]], tuple[list[Any], dict[str, Any]]],
    autograd: Autograd | None = None,
) -> Any:
    """Define ``moe_graph::<name>`` as a form of `opdef`.

    Args:
        name: torch name.
        schema: arguments and results.
        opdef: the op that is computed.
        to_ir: turns the positional and keyword arguments of the torch op into IR inputs and IR
            attributes.
        autograd: gradient of this form; None takes the one of `opdef`, and where that has none
            a backward pass through the op is an error.
    """
    unwrap = _single_or_tuple(schema)

    checks = ChecksOnce(opdef)

    def eager(*args: Any, **kwargs: Any) -> Any:
        inputs, given = to_ir(args, kwargs)
        soc = current_product()
        attrs, specs = checks(inputs, given, soc)
        outputs = opdef.kernel(inputs, attrs, soc)
        return unwrap(_fill_absent(opdef, inputs, specs, outputs))

    def fake(*args: Any, **kwargs: Any) -> Any:
        inputs, given = to_ir(args, kwargs)
        specs = opdef.infer(specs_of(inputs), opdef.bind_attrs(given), current_product())
        return unwrap(_fill_absent(opdef, inputs, specs, None))

    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, eager, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified, fake, lib=_library)
    _register_autograd(qualified, autograd or opdef.autograd or _no_gradient(qualified, opdef))
    return getattr(torch.ops.moe_graph, name).default


class _IrArguments:
    """Arguments of a generated torch op -> IR inputs and attributes: the same order, by name."""

    def __init__(self, opdef: OpDef) -> None:
        self._inputs = [declared.name for declared in opdef.inputs]
        self._names = self._inputs + [attr.name for attr in opdef.attrs]

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        inputs = [given.pop(name, None) for name in self._inputs]
        return inputs, given


def ir_arguments(
    opdef: OpDef, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Split the arguments of the generated torch op of `opdef` into IR inputs and all attributes.

    Raises:
        OpError: an attribute that the op does not take.
    """
    inputs, given = _IrArguments(opdef)(args, kwargs)
    return inputs, opdef.bind_attrs(given)


def _register_autograd(qualified: str, autograd: Autograd) -> None:
    overload = getattr(torch.ops.moe_graph, qualified.split("::")[1]).default
    names = [argument.name for argument in overload._schema.arguments]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        autograd.save(ctx, Arguments(names, inputs), outputs)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        by_name = autograd.backward(ctx, *grads)
        # The dispatcher drops trailing arguments that have their default, and an op with lists of
        # tensors may return no more gradients than it was given arguments.
        given = names[: len(ctx.needs_input_grad)]
        result = tuple(by_name.get(name) for name in given)
        return result if len(result) > 1 else result[0]

    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)


def _no_gradient(qualified: str, opdef: OpDef) -> Autograd:
    """Fail in the backward pass; PyTorch's own fallback warns and returns zeros."""

    def backward(ctx: Any, *grads: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        reason = f": {opdef.no_gradient}" if opdef.no_gradient else ""
        raise NotImplementedError(f"{qualified} has no gradient{reason}")

    return Autograd(save=lambda ctx, arguments, outputs: None, backward=backward)


class Arguments:
    """Arguments of a torch op as Python attributes."""

    def __init__(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self.__dict__.update(zip(names, values, strict=True))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _single_or_tuple(schema: str) -> Callable[[list[torch.Tensor]], Any]:
    returns = schema.rsplit("->", 1)[1].strip()
    if returns == "Tensor[]":
        return lambda outputs: outputs
    if returns == "Tensor":
        return lambda outputs: outputs[0]
    return tuple


def _fill_absent(
    opdef: OpDef,
    inputs: Sequence[Any],
    specs: Sequence[TensorSpec | None],
    outputs: Sequence[torch.Tensor | None] | None,
) -> list[torch.Tensor]:
    """Return a tensor for every output: computed, fresh (`outputs` is None), or empty ``[0]``."""
    first = next(value for value in inputs if value is not None)
    like = first[0] if isinstance(first, (list, tuple)) else first
    filled: list[torch.Tensor] = []
    for position, spec in enumerate(specs):
        if spec is None:
            filled.append(like.new_empty((0,), dtype=opdef.outputs[position].dtype))
        elif outputs is None:
            filled.append(like.new_empty(spec.shape, dtype=spec.dtype))
        else:
            value = outputs[position]
            assert value is not None, f"{opdef.ge_type} did not compute output {position}"
            filled.append(value)
    return filled


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
