"""What a model of a step's time has to know of the machine. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_core.errors import ConfigError

__all__ = ["DeviceKind", "Hardware"]

DeviceKind = Literal["cpu", "cuda", "npu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that a device sustains in training; assumptions, unless you measured them.

    Attributes:
        flops: Floating-point operations in a second, of matrix products.
        memory_bytes: Bytes read or written in a second, of device memory.
        link_bytes: Bytes in a second between device and host, in each direction.
        network_bytes: Bytes in a second between data-parallel ranks, for each.
    """

    flops: float = 150e12
    memory_bytes: float = 1e12
    link_bytes: float = 25e9
    network_bytes: float = 25e9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(
                    f"{field.name} is {getattr(self, field.name)!r}.",
                    instead="use a number above 0, per second.",
                )
