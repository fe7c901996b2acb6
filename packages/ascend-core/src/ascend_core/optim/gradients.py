"""Where the gradients of a step come from, and what the step multiplies them by."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from ascend_core.errors import ConfigError
from ascend_core.layout import read
from ascend_core.optim.home import Slot

__all__ = ["AttributeGradients", "Gradients", "Scaling"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a gradient scaler or clipping asks of a step.

    Attributes:
        grad_scale: What the gradients were multiplied by; 0-d, or None.
        found_inf: 1.0 where the step is to be skipped; 0-d on the device, or None.
        clip: What each gradient is multiplied by, in its own dtype; 0-d, or None.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    clip: torch.Tensor | None = None


class Gradients(Protocol):
    """Gives the gradients of a step."""

    def has(self, slot: Slot) -> bool:
        """Whether the slot has a gradient now."""

    def token(self, slot: Slot) -> object:
        """What stays equal exactly as long as the gradient is the same one."""

    def flat(self, slot: Slot) -> torch.Tensor:
        """The gradient in the order of the parameter's memory: [numel], on its device."""

    def release(self, slot: Slot) -> None:
        """The step is done with the slot's gradient."""


class AttributeGradients:
    """The gradients that backward leaves in `.grad`.

    Args:
        release: Drop each gradient as soon as it has been stepped.
    """

    def __init__(self, *, release: bool = False) -> None:
        self._release = release

    def has(self, slot: Slot) -> bool:
        """Whether `.grad` is there."""
        return slot.parameter.grad is not None

    def token(self, slot: Slot) -> object:
        """The gradient's identity and version."""
        grad = slot.parameter.grad
        return None if grad is None else (id(grad), grad._version)

    def flat(self, slot: Slot) -> torch.Tensor:
        """A view of `.grad`; a copy where it lies in memory otherwise than its parameter.

        Raises:
            ConfigError: When the gradient is sparse.
        """
        grad = slot.parameter.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"{slot.name} has a gradient of layout {grad.layout}.",
                why="a window is a range of elements, and a sparse gradient has none.",
                instead="use sparse=False in its embedding, or another optimizer for it.",
            )
        grad = grad.detach()
        if tuple(read(grad).stride) != tuple(slot.layout.stride):
            form = torch.empty_strided(
                slot.layout.size, slot.layout.stride, dtype=grad.dtype, device=grad.device
            )
            grad = form.copy_(grad)
        return read(grad).flatten(grad)

    def release(self, slot: Slot) -> None:
        """Drop `.grad`, where that was asked for."""
        if self._release:
            slot.parameter.grad = None
