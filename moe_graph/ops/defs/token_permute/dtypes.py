"""The dtype columns that the ops of this family share."""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

MIXED_ROWS = tuple(dtype for dtype in FLOATS for _ in FLOATS)
"""Rows, beside :data:`MIXED_PROBS`: every combination of the two."""

MIXED_PROBS = FLOATS * 3

INDEXED_ROWS = tuple(dtype for dtype in FLOATS for _ in range(2))
"""Rows, beside :data:`INDICES`: every combination of the two."""

INDICES = (torch.int64, torch.int32) * 3
