"""Does a module return one row per row of its input, for none as well? Asked of fake tensors."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

_ROWS = (0, 3)


def keeps_rows(module: nn.Module) -> bool:
    """Whether ``module(x)`` has as many rows as ``x`` ``[N, H]``, for no rows and for three.

    The module is run on tensors without data. H is the width of its first linear layer; without
    one the answer is False.
    """
    first = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
    if first is None:
        return False
    width, weight = first.in_features, first.weight
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return all(module(weight.new_empty(rows, width)).shape[0] == rows for rows in _ROWS)
    except Exception:  # whatever it is that fails, the answer is no
        return False
