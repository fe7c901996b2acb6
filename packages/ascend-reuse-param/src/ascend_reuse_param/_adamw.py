"""AdamW and Adam as one pass over weight, residual, gradient and moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_core.optim import Held, Slot
from ascend_reuse_param._bits import Parts
from ascend_reuse_param._kernels.native_adamw import AdamWOptions, Moments, NativeAdamW

__all__ = ["AdamWKernel"]

_NUMBERS = ("lr", "eps", "weight_decay")


class AdamWKernel:
    """Steps slices by the native step; see `ascend_core.optim.Kernel`.

    Args:
        native: The step.
        parts: Gives what is kept of a slice.
    """

    def __init__(self, native: NativeAdamW, parts: Callable[[Held], Parts]) -> None:
        self._native = native
        self._parts = parts

    def takes(self, slot: Slot, gradient: torch.dtype) -> bool:
        """Whether torch would step in the form that the native step equals: its for-loop's."""
        group = slot.group
        numbers = [*(group[name] for name in _NUMBERS), *group["betas"]]
        return (
            slot.has_master
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
        self._native.step(
            weight,
            self._parts(held),
            gradient,
            moments,
            step=step.item(),
            options=_options(held.slot.group),
        )


def _options(group: dict[str, Any]) -> AdamWOptions:
    return AdamWOptions(
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
    )
