"""Cases of the public unit tests of ops-transformer, read where the folder exists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

BESIDE_THE_CHECKOUT = Path(__file__).parents[2].parent / "shared" / "vectors"
FOLDER = Path(os.environ.get("MOE_GRAPH_VECTORS", BESIDE_THE_CHECKOUT))

DTYPES = {
    "float": torch.float32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
}


def cases(name: str) -> list[Any]:
    """Return the cases of a file as pytest params; one skipped param where the folder is absent."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        reason = f"no vectors in {FOLDER}"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    loaded = json.loads(path.read_text())["cases"]
    names = [case.get("case") or case.get("caseName") or str(n) for n, case in enumerate(loaded)]
    return [pytest.param(case, id=name) for name, case in zip(names, loaded, strict=True)]


def tensor(entry: dict[str, Any]) -> torch.Tensor:
    """Return the data of a golden input or output."""
    return torch.tensor(entry["data"], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
