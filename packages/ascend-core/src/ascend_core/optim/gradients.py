"""Where the gradients of a step come from, and what the step multiplies them by."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.layout import Layout, read
from ascend_core.optim.home import Slot
from ascend_core.streams import Event
from ascend_core.transfer import Transfer

__all__ = ["AttributeGradients", "Gradients", "Scaling", "flattened"]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What a gradient scaler asks of a step.

    Attributes:
        grad_scale: What the gradients were multiplied by; 0-d, or None.
        found_inf: 1.0 where the step is to be skipped; 0-d on the device, or None.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


class Gradients(Protocol):
    """Gives the gradients of a step."""

    @property
    def transfer(self) -> Transfer | None:
        """What brings gradients to the device, for sources that keep them on the host."""

    def follow(self, slots: Sequence[Slot]) -> None:
        """Learn which slots there are now."""

    def has(self, slot: Slot) -> bool:
        """Whether the slot has a gradient now."""

    def token(self, slot: Slot) -> object:
        """What stays equal exactly as long as the gradient is the same one."""

    def flat(self, slot: Slot) -> torch.Tensor:
        """The gradient in the order of the parameter's memory: [numel], wherever it is.

        Raises:
            ConfigError: When it cannot be cut into slices.
        """

    def written(self, slot: Slot) -> tuple[Event, ...]:
        """The copies that must end before what `flat` gave is read, where it is on the host."""

    def factors(self, slot: Slot) -> Sequence[torch.Tensor]:
        """What `flat` is still to be multiplied by, in this order, each 0-d, in its own dtype."""

    def clip(self, slots: Sequence[Slot], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the norm of the gradients of `slots` together, as `clip_grad_norm_` of torch does.

        Returns:
            The norm before; 0-d, on the parameters' device.
        """

    def release(self, slot: Slot) -> None:
        """The step is done with the slot's gradient."""

    def close(self) -> None:
        """Put back into `.grad` what is kept beside it, and let go of the parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Token:
    """A gradient, which this keeps no memory of: another one may get the `id` of one that died."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Token) or self.version != other.version:
            return False
        gradient = self.gradient()
        return gradient is not None and gradient is other.gradient()


class AttributeGradients:
    """The gradients that backward leaves in `.grad`.

    Args:
        release: Drop each gradient as soon as it has been stepped.
    """

    transfer: Transfer | None = None

    def __init__(self, *, release: bool = False) -> None:
        self._release = release

    def follow(self, slots: Sequence[Slot]) -> None:
        """Nothing to learn."""

    def has(self, slot: Slot) -> bool:
        """Whether `.grad` is there."""
        return slot.parameter.grad is not None

    def token(self, slot: Slot) -> object:
        """The gradient's identity and version."""
        grad = slot.parameter.grad
        if grad is not None and grad.is_inference():
            raise ConfigError(
                f"the gradient of {slot.name} was made in inference mode.",
                why="torch does not note what is written to such a tensor.",
                instead="make it outside, or clone() it there.",
            )
        return None if grad is None else _Token(weakref.ref(grad), grad._version)

    def flat(self, slot: Slot) -> torch.Tensor:
        """A view of `.grad`; a copy where it lies in memory otherwise than its parameter."""
        grad = slot.parameter.grad
        assert grad is not None
        return flattened(grad, slot)

    def written(self, slot: Slot) -> tuple[Event, ...]:
        """Nothing is ever under way."""
        return ()

    def factors(self, slot: Slot) -> Sequence[torch.Tensor]:
        """Clipping is done in place."""
        return ()

    def clip(self, slots: Sequence[Slot], max_norm: float, norm_type: float) -> torch.Tensor:
        """Torch's own function, on `.grad`."""
        parameters = [slot.parameter for slot in slots]
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def release(self, slot: Slot) -> None:
        """Drop `.grad`, where that was asked for."""
        if self._release:
            slot.parameter.grad = None

    def close(self) -> None:
        """Nothing is kept beside `.grad`."""


def flattened(grad: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A gradient as its parameter lies in memory: [numel]; a view where it lies so itself.

    Raises:
        ConfigError: When it is sparse, or another object than a tensor with its own memory.
    """
    if not Layout.fits(grad):
        raise ConfigError(
            f"{slot.name} has a gradient of layout {grad.layout} and type {type(grad).__name__}.",
            why="a window is a range of elements in memory, and this gradient has none.",
            instead="use sparse=False in its embedding, or another optimizer for it.",
        )
    layout = read(grad)
    if not layout.is_dense or layout.negative or not _lies_like(layout, slot.layout):
        form = torch.empty_strided(
            slot.layout.size, slot.layout.stride, dtype=grad.dtype, device=grad.device
        )
        grad = form.copy_(grad.detach())
        layout = read(grad)
    return layout.flatten(grad)


def _lies_like(one: Layout, other: Layout) -> bool:
    """Whether elements follow one another alike: the stride of a single element may be anything."""
    strides = zip(one.size, one.stride, other.stride, strict=True)
    return all(mine == its for size, mine, its in strides if size != 1)
