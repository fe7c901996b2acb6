"""Estimates the bytes and the time of a training. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ascend_core.options import check_one_of
from ascend_suite.estimation.blueprint import Blueprint
from ascend_suite.estimation.hardware import DeviceKind, Hardware
from ascend_suite.estimation.kernels import KERNELS
from ascend_suite.estimation.memory import StageMemory
from ascend_suite.estimation.result import Estimate, StepTime
from ascend_suite.estimation.time import step_time
from ascend_suite.estimation.treatment import FEATURES
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["Estimator", "estimate"]


def estimate(
    shape: ModelShape,
    plan: Plan | None = None,
    *,
    device: DeviceKind = "npu",
    hardware: Hardware | None = None,
) -> Estimate:
    """Estimate what a device holds over a step, and how long the step takes.

    Args:
        shape: The model and its training.
        plan: The features that are on; none when left out. Its `training` is not read: `shape` says
            what the training is.
        device: The kind of device; what features move to the host on a CPU stays where it is.
        hardware: The machine's rates, for the time; those of `Hardware()` when left out.

    Returns:
        The bytes of the device that takes most, on the first pipeline stage or the last; the host's
        beside the stage that takes most of that; the time of the slowest.

    Raises:
        ConfigError: When `device` is none of "cpu", "cuda" and "npu".

    Example:
        >>> shape = ModelShape(layers=2, hidden=64, heads=2, seq=128, vocab=256)
        >>> estimate(shape, device="cpu").peak.name
        'layer backward'
    """
    check_one_of("device", device, tuple(KERNELS))
    estimator = Estimator(Blueprint(shape, device), hardware or Hardware())
    return estimator.estimate(plan or Plan())


class Estimator:
    """Estimates several plans for one shape; what they have in common is worked out once.

    Args:
        blueprint: The shape, and the kind of device.
        hardware: The machine's rates.
    """

    def __init__(self, blueprint: Blueprint, hardware: Hardware) -> None:
        self._blueprint = blueprint
        self._hardware = hardware
        stages = sorted({0, blueprint.shape.pp - 1})
        self._plain = {stage: StageMemory(blueprint, Plan(), stage) for stage in stages}

    def estimate(self, plan: Plan) -> Estimate:
        """Estimate one plan; see `estimate`."""
        blueprint, shape = self._blueprint, self._blueprint.shape
        stages = (StageMemory(blueprint, plan, stage) for stage in self._plain)
        points = [(stage, stage.moments()) for stage in stages]
        highest, moments = max(points, key=lambda one: max(moment.total for moment in one[1]))
        return Estimate(
            shape=shape,
            plan=plan,
            device=blueprint.device,
            parameters=blueprint.parameters,
            parameters_per_device=sum(highest.sizes),
            moments=moments,
            host_bytes=max(stage.optimizer.host + stage.moved for stage, _ in points),
            time=self._time([stage for stage, _ in points]),
            notes=tuple(_notes(shape, plan, highest.stage)),
        )

    def _time(self, stages: Sequence[StageMemory]) -> StepTime:
        """That of the slowest stage, which the others wait for; not of the fullest one."""
        times = [step_time(one, self._plain[one.stage], self._hardware) for one in stages]
        slowest = max(times, key=lambda time: time.seconds)
        plain = max(time.plain_seconds for time in times)
        return dataclasses.replace(slowest, plain_seconds=plain)


def _notes(shape: ModelShape, plan: Plan, stage: int) -> list[str]:
    notes = [f"{name} is not counted." for name in sorted(set(plan.features) - set(FEATURES))]
    if shape.pp > 1:
        notes.append(f"pipeline stage {stage} of {shape.pp} takes most.")
    if "swap-optimizer" in plan.features or "swap-attention" in plan.features:
        notes.append("page-locked host memory comes in powers of two: up to twice as much.")
    return notes
