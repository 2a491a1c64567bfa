"""Cases of the token_permute family that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vectors.question import Question

ADAPTERS: dict[str, Callable[[Any], Question]] = {}
