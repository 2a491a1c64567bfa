"""The MoE ops: definitions (:class:`OpDef`), torch ops, and the public functions over them.

Importing this package registers ``torch.ops.moe_graph.*``.
"""

from __future__ import annotations

from moe_graph.ops import defs as _defs  # noqa: F401  registers the OpDefs and the torch ops
from moe_graph.ops import functional as _functional
from moe_graph.ops.errors import OpError
from moe_graph.ops.functional import *  # noqa: F403
from moe_graph.ops.opdef import Attr, Input, OpDef, Output, TensorSpec
from moe_graph.ops.product import current_product, use_product
from moe_graph.ops.registry import all_opdefs, find, register
from moe_graph.ops.shapes import infer_shape

__all__ = [
    "Attr",
    "Input",
    "OpDef",
    "OpError",
    "Output",
    "TensorSpec",
    "all_opdefs",
    "current_product",
    "find",
    "infer_shape",
    "register",
    "use_product",
]
__all__ += _functional.__all__
