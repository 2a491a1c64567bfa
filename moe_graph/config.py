"""What a user can set: the product to compile for, and what to do about a layer that is left alone.

``Soc`` names the Ascend products by the short names that the documentation of the ops uses.
``Config`` is an immutable value, given once to :func:`moe_graph.npu_backend`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class Soc(str, enum.Enum):
    """An Ascend product. ``A2`` is Ascend 910B, ``A3`` is Ascend 910_93, ``950`` is Ascend 950."""

    A2 = "A2"
    A3 = "A3"
    ASCEND950 = "950"

    @classmethod
    def parse(cls, name: str) -> Soc:
        """Return the product called `name`.

        Raises:
            ValueError: `name` is none of ``"A2"``, ``"A3"``, ``"950"``.
        """
        try:
            return cls(name.strip().upper())
        except ValueError:
            wanted = ", ".join(repr(soc.value) for soc in cls)
            raise ValueError(
                f"unsupported product: got {name!r}, want one of {wanted}; "
                "set MOE_GRAPH_SOC or Config(soc=...) to one of these"
            ) from None

    @classmethod
    def of_device(cls, name: str) -> Soc:
        """Return the product of a device by the name that CANN gives it, like ``Ascend910B3``.

        Raises:
            ValueError: the device is of no supported product.
        """
        for prefix, soc in _DEVICE_PREFIXES.items():
            if name.startswith(prefix):
                return soc
        raise ValueError(
            f"unsupported product: device {name!r}, want one whose name begins with "
            f"{', '.join(_DEVICE_PREFIXES)}; set Config(soc=...) to check for another product"
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Soc:
        """Return the product that ``MOE_GRAPH_SOC`` names, ``A2`` when it is unset."""
        return cls.parse(environ.get("MOE_GRAPH_SOC", cls.A2.value))


_DEVICE_PREFIXES = {
    "Ascend910B": Soc.A2,
    "Ascend910_93": Soc.A3,
    "Ascend950": Soc.ASCEND950,
}
ON_MISS = ("warn", "error", "ignore")
FUSE_ROUTERS = ("fp32", "all", "none")


@dataclass(frozen=True)
class Config:
    """Settings of one backend.

    Args:
        soc: product to check limits against, ``"A2"``, ``"A3"`` or ``"950"``; None takes
            ``MOE_GRAPH_SOC`` (default ``"A2"``) on the emulated stack and the device's own name on
            a real one.
        on_miss: what to do about a MoE layer that was recognised in part but not rewritten:
            ``"warn"`` logs one line, ``"error"`` raises :class:`moe_graph.report.KeptLayerError`,
            ``"ignore"`` leaves it to the report.
        verify: run every rewritten region against the nodes it replaced, on random inputs, while
            compiling; where they differ, the region stays as it was and the report says so.
        dump_dir: directory that receives the FX graph before and after the passes, the GE graph and
            ``report.json``; None writes nothing.
        fuse_routers: which routers of rewritten layers one op (MoeGatingTopKSoftmax, its V2, or
            MoeGatingTopK) computes where it computes the same. Of two experts with equal scores it
            chooses the lower one, ``torch.topk`` any. ``"fp32"``: routers with logits in float32,
            where scores are hardly ever equal; ``"all"``: also those with logits of 16 bits, where
            a token in fifty may get another expert than eager code gives it; ``"none"``.

    Raises:
        ValueError: a field has a value that is not listed above.
    """

    soc: str | None = None
    on_miss: str = "warn"
    verify: bool = False
    dump_dir: str | os.PathLike[str] | None = None
    fuse_routers: str = "fp32"

    def __post_init__(self) -> None:
        if self.on_miss not in ON_MISS:
            raise ValueError(f"Config.on_miss: got {self.on_miss!r}, want one of {ON_MISS}")
        if self.fuse_routers not in FUSE_ROUTERS:
            raise ValueError(
                f"Config.fuse_routers: got {self.fuse_routers!r}, want one of {FUSE_ROUTERS}"
            )
        if self.soc is not None:
            Soc.parse(self.soc)

    @property
    def product(self) -> Soc:
        """The product that limits are checked against."""
        if self.soc is not None:
            return Soc.parse(self.soc)
        from moe_graph.device import machine_product

        return machine_product()

    @property
    def dump_path(self) -> Path | None:
        """`dump_dir` as a path, None when nothing is to be written."""
        return Path(self.dump_dir) if self.dump_dir is not None else None
