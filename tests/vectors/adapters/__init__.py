"""From a public case to a question: the plain kinds here, files that need more by family.

A family module has ``ADAPTERS``: file name -> function of a case that returns a Question or raises
NotAsked. A file without an adapter of its own is read as its kind (the prefix of its name).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vectors.adapters import (
    distribute,
    experts,
    finalize_routing,
    gating,
    init_routing,
    kernel_sizes,
    plain,
    products,
    routing_map,
    token_permute,
)
from tests.vectors.question import NotAsked, Question

_FAMILIES = (
    distribute,
    experts,
    finalize_routing,
    gating,
    init_routing,
    kernel_sizes,
    products,
    routing_map,
    token_permute,
)
_BY_FILE: dict[str, Callable[[Any], Question]] = {}
for _family in _FAMILIES:
    _BY_FILE.update(_family.ADAPTERS)
_BY_KIND = {"infershape": plain.infershape, "tiling": plain.tiling, "golden": plain.golden}


def question_of(file: str, case: Any) -> Question:
    """Return the question that a case of `file` asks.

    Raises:
        NotAsked: it cannot be put to an OpDef.
    """
    adapter = _BY_FILE.get(file) or _BY_KIND.get(file.split("_")[0])
    if adapter is None:
        raise NotAsked(f"{case.get('op', file)} is about no op of this project")
    try:
        return adapter(case)
    except KeyError as missing:
        raise NotAsked(f"{missing} is no dtype of PyTorch") from None
