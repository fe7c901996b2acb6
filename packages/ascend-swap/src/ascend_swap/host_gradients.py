"""Gradients that leave the device as soon as backward has made them.

[Note: accumulating on the host]
When autograd has added to a parameter's `.grad`, a hook takes it: it is copied to the host on the
outward stream and dropped from the device. For the next micro-batch the sum so far is fetched, the
new gradient is added on the device, by the same operator as autograd's, and the sum goes back. So
at most one gradient and one sum are on the device at a time, and every bit is as it would be there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ascend_core.optim import Slot, flattened, norm_of
from ascend_core.pinned import PinnedPool
from ascend_core.streams import Event
from ascend_core.transfer import HostCopy, Transfer

__all__ = ["HostGradients"]


class HostGradients:
    """Keeps the gradients of a step on the host, from backward to their window.

    Args:
        device: Of the parameters.
        pool: The host memory.
    """

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.transfer = Transfer(device, pool=pool)
        self._sums: dict[Slot, HostCopy] = {}
        self._hooks: dict[Slot, tuple[torch.Tensor, RemovableHandle]] = {}

    def follow(self, slots: Sequence[Slot]) -> None:
        """Hook the parameters that are new, and let go of those that are gone."""
        for slot in self._hooks.keys() - set(slots):
            self._unhook(slot)
        for slot in slots:
            hooked = self._hooks.get(slot)
            if hooked is not None and hooked[0] is not slot.parameter:
                self._unhook(slot)
            if slot not in self._hooks and slot.parameter.requires_grad:
                self._hooks[slot] = slot.parameter, _hooked(slot.parameter, _taking(self, slot))

    def has(self, slot: Slot) -> bool:
        """Whether a gradient is on the host, or was put into `.grad` since."""
        return slot in self._sums or slot.parameter.grad is not None

    def token(self, slot: Slot) -> object:
        """The identity of the sum; None where there is none."""
        self.take(slot)
        kept = self._sums.get(slot)
        return None if kept is None else id(kept)

    def flat(self, slot: Slot) -> torch.Tensor:
        """The sum on the host: [numel]."""
        self.take(slot)
        return self._sums[slot].stored()

    def written(self, slot: Slot) -> tuple[Event, ...]:
        """The last copy of the sum."""
        return self._sums[slot].last_use

    def norm(self, slot: Slot, norm_type: float) -> torch.Tensor:
        """The norm of the sum, which comes to the device for it."""
        self.take(slot)
        return norm_of(flattened(self._sums[slot].fetch().wait(), slot), norm_type)

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Add `.grad` to the sum on the host, and drop it. Does not block the host."""
        grad = slot.parameter.grad
        if grad is None:
            return
        if grad.layout is torch.strided:
            grad = slot.shaped(flattened(grad, slot))
        held = self._sums.get(slot)
        if held is not None:
            grad = held.fetch().wait().add_(grad)
        self._sums[slot] = self.transfer.to_host(grad)
        slot.parameter.grad = None

    def clear(self, *, set_to_none: bool) -> None:
        """Forget the sums, or set them to zero."""
        if set_to_none:
            self._sums.clear()
        for held in self._sums.values():
            held.on_host().zero_()

    def release(self, slot: Slot) -> None:
        """Give the host memory of a sum back."""
        self._sums.pop(slot, None)

    def close(self) -> None:
        """Bring the sums back into `.grad`, and unhook every parameter."""
        for slot, held in self._sums.items():
            slot.parameter.grad = held.fetch().wait()
        self._sums.clear()
        for slot in list(self._hooks):
            self._unhook(slot)

    def _unhook(self, slot: Slot) -> None:
        self._hooks.pop(slot)[1].remove()


def _taking(gradients: HostGradients, slot: Slot) -> Callable[[torch.Tensor], None]:
    """A hook that holds neither the parameter nor the optimizer alive."""
    owner, place = weakref.ref(gradients), weakref.ref(slot)

    def take(parameter: torch.Tensor) -> None:
        found, where = owner(), place()
        if found is not None and where is not None:
            found.take(where)

    return take


def _hooked(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    register: Any = parameter.register_post_accumulate_grad_hook
    handle: RemovableHandle = register(hook)
    return handle
