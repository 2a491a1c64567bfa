"""The files of public cases, where the folder that holds them exists."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

BESIDE_THE_CHECKOUT = Path(__file__).parents[2].parent / "shared" / "vectors"
FOLDER = Path(os.environ.get("MOE_GRAPH_VECTORS", BESIDE_THE_CHECKOUT))

DTYPES = {
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "double": torch.float64,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e8m0": torch.float8_e8m0fnu,
    "float4_e2m1": torch.float4_e2m1fn_x2,
}


def files() -> list[str]:
    """Return the names of the files, without ``.json``; none where the folder is absent."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@functools.cache
def cases(file: str) -> dict[str, Any]:
    """Return the cases of a file by name; a name that occurs twice gets ``#2``, ``#3``."""
    loaded = json.loads((FOLDER / f"{file}.json").read_text())["cases"]
    named: dict[str, Any] = {}
    for number, case in enumerate(loaded):
        given = case.get("case") or case.get("caseName") or case.get("case_name")
        name, again = str(given or number), 1
        while (name if again == 1 else f"{name}#{again}") in named:
            again += 1
        named[name if again == 1 else f"{name}#{again}"] = case
    return named


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name, GE's or PyTorch's, in any case.

    Raises:
        KeyError: PyTorch has no such dtype.
    """
    lower = name.lower().removeprefix("dt_")
    found = DTYPES.get(lower, getattr(torch, lower, None))
    if not isinstance(found, torch.dtype):
        raise KeyError(name)
    return found


def tensor_of(entry: dict[str, Any]) -> torch.Tensor:
    """Return the data of a golden input or output."""
    return torch.tensor(entry["data"], dtype=dtype_of(entry["dtype"])).reshape(entry["shape"])
