"""AdamW and Adam as one pass over weight, residual, gradient and moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ascend_core.optim import Held, Slot
from ascend_reuse_param._bits import Parts
from ascend_reuse_param._kernels.adamw import AdamWOptions, AdamWStep, Moments

__all__ = ["AdamWKernel", "Form"]

Form = Literal["for-loop", "foreach"]

_NUMBERS = ("lr", "eps", "weight_decay")


class AdamWKernel:
    """Steps slices in one pass; see `ascend_core.optim.Kernel`.

    Args:
        steps: By the form of torch whose bits each gives.
        parts: Gives what is kept of a slice.
    """

    def __init__(self, steps: Mapping[Form, AdamWStep], parts: Callable[[Held], Parts]) -> None:
        self._steps = steps
        self._parts = parts

    def takes(self, slot: Slot, gradient: torch.dtype) -> bool:
        """Whether torch would step in a form that there is a step for."""
        group = slot.group
        numbers = [*(group[name] for name in _NUMBERS), *group["betas"]]
        return (
            slot.has_master
            and _form(slot) in self._steps
            and gradient in (torch.bfloat16, torch.float32)
            and not (group.get("fused") or group.get("capturable"))
            and all(isinstance(number, (int, float)) for number in numbers)
        )

    def step(self, held: Held, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step a slice in place."""
        step = held.scalars["step"]
        step += 1
        elements = held.elements
        moments = Moments(
            elements["exp_avg"], elements["exp_avg_sq"], elements.get("max_exp_avg_sq")
        )
        self._steps[_form(held.slot)].step(
            weight,
            self._parts(held),
            gradient,
            moments,
            step=step.item(),
            options=_options(held.slot.group),
        )


def _form(slot: Slot) -> Form:
    """The form that torch would step in, where it is not the fused one."""
    foreach = slot.group.get("foreach")
    if foreach is None and slot.group.get("fused") is None:
        devices = _get_foreach_kernels_supported_devices()
        foreach = slot.device.type in devices and not slot.group.get("differentiable")
    return "foreach" if foreach else "for-loop"


def _options(group: dict[str, Any]) -> AdamWOptions:
    return AdamWOptions(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )
