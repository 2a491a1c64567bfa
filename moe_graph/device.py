"""The product of this machine: what limits are checked against where no setting names one."""

from __future__ import annotations

import functools
import os

from moe_graph import emulator
from moe_graph.config import Soc


def machine_product() -> Soc:
    """Return the product that ``MOE_GRAPH_SOC`` names, else the product of device 0.

    Without CANN the variable also decides which product is emulated, ``A2`` when it is unset.

    Raises:
        ValueError: the variable or the device names a product that is not supported.
    """
    if emulator.emulated or "MOE_GRAPH_SOC" in os.environ:
        return Soc.from_environment()
    return _device_product()


@functools.cache
def _device_product() -> Soc:
    import torch_npu

    return Soc.of_device(torch_npu.npu.get_device_name(0))
