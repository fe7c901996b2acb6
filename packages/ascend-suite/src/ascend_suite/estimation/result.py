"""What an estimate says. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ascend_suite.estimation.hardware import DeviceKind
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["Estimate", "Moment", "StepTime"]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point in the step, and what a device holds then.

    Attributes:
        name: "forward", "loss", "backward" or "optimizer step".
        bytes: Of each kind: "weights", "gradients", "masters", "moments", "residuals" (of
            reuse-fp32-param), "activations: norm" and the like by origin, "working: backward" and
            the like for what is there for a moment.
    """

    name: str
    bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        present = {kind: number for kind, number in self.bytes.items() if number}
        object.__setattr__(self, "bytes", MappingProxyType(present))

    @property
    def total(self) -> int:
        """All bytes together."""
        return sum(self.bytes.values())


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step, by a model of it; nothing here was measured.

    Attributes:
        seconds: Of a step, with the hardware that the estimate was given.
        plain_seconds: Of a step without any feature.
        by_part: Seconds by part: "compute", "recompute", "waiting for copies",
            "optimizer step", "pipeline bubble".
    """

    seconds: float
    plain_seconds: float
    by_part: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_part", MappingProxyType(dict(self.by_part)))

    @property
    def ratio(self) -> float:
        """How many times as long as a plain step."""
        return self.seconds / self.plain_seconds


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a training is expected to take, of the device that takes most.

    Attributes:
        shape: The model and its training.
        plan: The features that are on.
        device: The kind of device.
        parameters: Of the whole model.
        parameters_per_device: Of them on one device.
        moments: The points of the step at which memory may be highest, in their order.
        host_bytes: Host memory that features reserve for one device.
        time: The time of a step.
        notes: What the estimate assumed, and options that it does not know how to count.
    """

    shape: ModelShape
    plan: Plan
    device: DeviceKind
    parameters: int
    parameters_per_device: int
    moments: tuple[Moment, ...]
    host_bytes: int
    time: StepTime
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Moment:
        """The moment at which the device holds most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """What the device holds then."""
        return self.peak.total

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, without the plan."""
        return {
            "shape": dataclasses.asdict(self.shape),
            "features": sorted(self.plan.features),
            "device": self.device,
            "parameters": self.parameters,
            "parameters_per_device": self.parameters_per_device,
            "peak_bytes": self.peak_bytes,
            "peak_at": self.peak.name,
            "moments": [{"name": m.name, "bytes": dict(m.bytes)} for m in self.moments],
            "host_bytes": self.host_bytes,
            "step_seconds": self.time.seconds,
            "ratio_to_plain": self.time.ratio,
            "seconds_by_part": dict(self.time.by_part),
            "notes": list(self.notes),
        }
