"""Where a node comes from: module path, source line, and the MoE layer that it belongs to.

Dynamo records a stack trace and the stack of modules on every FX node. :func:`annotate` turns them
into one short text and leaves it where TorchAir copies it onto each GE node that a converter makes
(GE attribute ``nn_module_stack``), so that an error of the graph engine and the report's node
counts can name the layer and the line.

FX node meta before::

    stack_trace      "... File modeling_mixtral.py, line 98, in forward ..."
    nn_module_stack  {"L__self__": (...), ..., "L['self'].model.layers[0].mlp": (...)}

GE attribute after::

    "model.layers.0.mlp at modeling_mixtral.py:98 [moe model.layers.0.mlp]"
"""

from __future__ import annotations

import re
from typing import Any

import torch.fx

GE_ATTRIBUTE = "nn_module_stack"
LAYER_KEY = "moe_graph_layer"
_FX_TENSOR = "_fx_tensor_name"  # "<FX node>-<target>.OUTPUT.<i>", on each GE output that has one
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LAYER = re.compile(r" \[moe (?P<layer>[^\]]+)\]$")


def module_path(node: torch.fx.Node) -> str:
    """Return the path of the innermost module that made `node`, empty when it is unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, dict) or not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _readable_path(path)


def _readable_path(path: str) -> str:
    """Turn dynamo's ``L['self'].model.layers[0].mlp`` into ``model.layers.0.mlp``."""
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in ("L", "self", "_modules")]
    return ".".join(part for part in parts if not part.startswith("_orig_mod"))


def source_line(node: torch.fx.Node) -> str:
    """Return ``file:line`` of the innermost user frame that made `node`, empty when unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{short_path(file)}:{line}"


def short_path(file: str) -> str:
    """Return the path of a file, that of an installed one from its package on."""
    return file.rpartition("site-packages/")[2]


def layer_of(node: torch.fx.Node) -> str:
    """Return the path of the rewritten MoE layer that `node` belongs to, empty for none."""
    custom = node.meta.get("custom")
    return custom.get(LAYER_KEY, "") if isinstance(custom, dict) else ""


def describe(node: torch.fx.Node) -> str:
    """Return the text of the module docstring for `node`, empty when nothing is known."""
    place = " at ".join(filter(None, (module_path(node), source_line(node))))
    layer = layer_of(node)
    return f"{place} [moe {layer}]" if layer else place


def annotate(gm: torch.fx.GraphModule) -> None:
    """Leave :func:`describe` on every node of the ATen graph `gm` for TorchAir to copy."""
    for node in gm.graph.nodes:
        text = describe(node)
        node.meta[GE_ATTRIBUTE] = text or None


def annotate_custom_nodes(gm: torch.fx.GraphModule, ge_graph: Any) -> None:
    """Write the same text onto the nodes made by ``ge.custom_op``, which TorchAir leaves out."""
    origins = {node.name: node.meta[GE_ATTRIBUTE] for node in gm.graph.nodes}
    for op in ge_graph.op:
        if GE_ATTRIBUTE in op.attr:
            continue
        text = next(filter(None, (origins.get(name) for name in _fx_names(op))), None)
        if text:
            op.attr[GE_ATTRIBUTE].s = text.encode()


def _fx_names(op: Any) -> list[str]:
    """Return the names of the FX nodes whose results are outputs of a GE node."""
    tensors = [
        desc.attr[_FX_TENSOR].s.decode() for desc in op.output_desc if _FX_TENSOR in desc.attr
    ]
    return [name.partition("-")[0] for name in tensors]


def layer_in(ge_attribute: Any) -> str:
    """Return the MoE layer named by a GE attribute text, empty for none."""
    found = _LAYER.search(ge_attribute or "")
    return found["layer"] if found else ""
