"""Put a question to its OpDef and compare the answer."""

from __future__ import annotations

import pytest
import torch

from moe_graph.ops import OpDef, OpError, find
from moe_graph.ops.opdef import Call, Specs
from tests.vectors.question import NotAsked, Question


def ask(question: Question) -> None:
    """Raise AssertionError unless the OpDef answers as the case expects.

    Raises:
        NotAsked: there is no such op.
    """
    opdef = find(question.op)
    if opdef is None:
        raise NotAsked(f"{question.op} is not one of the ops of this project")
    if question.want == "reject":
        with pytest.raises(OpError):
            _infer(opdef, question)
    elif question.want == "accept":
        _infer(opdef, question)
    elif question.want == "shapes":
        _compare_shapes(opdef, question)
    else:
        _compare_values(opdef, question)


def _infer(opdef: OpDef, question: Question) -> Specs:
    only_infershape = question.only_infershape or question.want == "shapes"
    attrs = opdef.bind_attrs(question.attrs, complete=not only_infershape)
    if not only_infershape:
        return opdef.infer(question.inputs, attrs, question.soc, outputs=question.outputs)
    if question.part != "both":
        call = Call(opdef, question.inputs, attrs, question.soc)
        if question.part == "shapes":
            return opdef.shape_rule(call)
        opdef.dtype_rule(call)
        return []
    return opdef.infer_shape(question.inputs, attrs, question.soc, upstream=True)


def _compare_shapes(opdef: OpDef, question: Question) -> None:
    specs = _infer(opdef, question)
    for output, spec, shape in zip(opdef.outputs, specs, question.shapes, strict=False):
        if shape is not None:
            got = [] if spec is None else list(spec.shape)
            assert got == shape, f"{output.name}: got {got}, want {shape}"


def _compare_values(opdef: OpDef, question: Question) -> None:
    attrs = opdef.bind_attrs(question.attrs)
    for compute in (opdef.kernel, opdef.reference):
        results = compute(question.inputs, attrs, question.soc)
        for got, want in zip(results, question.values, strict=False):
            if want is not None:
                assert got is not None
                got = got[: len(want)] if question.only_leading else got
                torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=0)
