"""Gradients that leave the device as soon as backward has made them.

[Note: accumulating on the host]
When autograd has put a gradient into a parameter's `.grad`, a hook takes it: it is copied to the
host on the outward stream, and `.grad` holds a `HostGradient` instead, which takes no memory of the
device. For the next micro-batch autograd adds to that: the sum so far is fetched, the new gradient
is added on the device, by autograd's own operator, and the sum goes back. So at most one gradient
and one sum are on the device at a time, and every bit is as it would be there.

There is no table of sums: a sum is where `.grad` is, and goes when `.grad` is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import ConfigError
from ascend_core.optim import Slot, flattened
from ascend_core.pinned import PinnedPool
from ascend_core.streams import Event
from ascend_core.takers import Taker, takers_of
from ascend_core.transfer import Transfer
from ascend_swap.host_gradient import HostGradient, HostValues

__all__ = ["HostGradients"]

Hooks = dict[Slot, tuple[torch.Tensor, RemovableHandle]]

_OFFLOADING = Taker(
    "swap_optimizer(offload_gradients=True)",
    does="moves each gradient to the host as soon as it is there",
    instead="leave offload_gradients off, or remove() that optimizer first",
)


class HostGradients:
    """Keeps the gradients of a step on the host, from backward to their window.

    Args:
        device: Of the parameters.
        pool: The host memory.
    """

    def __init__(self, device: torch.device, pool: PinnedPool) -> None:
        self.transfer = Transfer(device, pool=pool)
        self._hooks: Hooks = {}
        # The parameters may outlive the optimizer, and their gradients should stay with them then.
        weakref.finalize(self, _unhook_all, self._hooks).atexit = False

    def follow(self, slots: Sequence[Slot]) -> None:
        """Hook the parameters that are new, and let go of those that are gone.

        Raises:
            ConfigError: When another optimizer, or another feature, takes the gradient of a
                parameter. None was hooked.
        """
        for slot in self._hooks.keys() - set(slots):
            self._unhook(slot)
        for slot in slots:
            hooked = self._hooks.get(slot)
            if hooked is not None and hooked[0] is not slot.parameter:
                self._unhook(slot)
        new = [s for s in slots if s not in self._hooks and s.parameter.requires_grad]
        for slot in new:
            _check_is_free(slot)
        for slot in new:
            register: Any = slot.parameter.register_post_accumulate_grad_hook
            self._hooks[slot] = slot.parameter, register(_Taking(self, slot))

    def has(self, slot: Slot) -> bool:
        """Whether `.grad` is there."""
        return slot.parameter.grad is not None

    def token(self, slot: Slot) -> object:
        """The identity of the values, and how often they were written; None without any."""
        if not self.has(slot):
            return None
        values = self._values(slot)
        return weakref.ref(values), values.version

    def flat(self, slot: Slot) -> torch.Tensor:
        """The gradient on the host: [numel]."""
        return self._values(slot).stored()

    def written(self, slot: Slot) -> tuple[Event, ...]:
        """The last copy of the gradient."""
        return self._values(slot).last_use

    def factors(self, slot: Slot) -> Sequence[torch.Tensor]:
        """What clipping left to be done."""
        return self._values(slot).factors

    def clip(self, slots: Sequence[Slot], max_norm: float, norm_type: float) -> torch.Tensor:
        """Fetch each gradient for its norm, and note what it is to be multiplied by."""
        # The formulas of torch.nn.utils.get_total_norm and clip_grads_with_norm_, which put the
        # norms of one dtype beside each other.
        all_values = [self._values(slot) for slot in slots]
        forms: list[torch.Tensor | None] = [
            torch.empty(0, dtype=v.layout.dtype, device=v.device) for v in all_values
        ]
        grouped = _group_tensors_by_device_and_dtype([forms], with_indices=True)
        norms = [
            torch._foreach_norm([all_values[i].fetch()], norm_type)[0]
            for _, indices in grouped.values()
            for i in indices
        ]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for values in all_values:
            values.multiply(factor)
        return total

    @torch.no_grad()
    def take(self, slot: Slot) -> None:
        """Move `.grad` to the host, if it is not there yet. Does not block the host.

        Frees the gradient on the device.
        """
        grad = slot.parameter.grad
        if grad is None or isinstance(grad, HostGradient):
            return
        if grad.layout is torch.strided:
            grad = slot.shaped(flattened(grad, slot))
        slot.parameter.grad = HostGradient(HostValues(self.transfer, grad))

    def release(self, slot: Slot) -> None:
        """Drop `.grad`, and the host memory with it."""
        slot.parameter.grad = None

    def close(self) -> None:
        """Bring the gradients back to the device, and unhook every parameter."""
        for slot, (parameter, _) in self._hooks.items():
            if isinstance(parameter.grad, HostGradient):
                parameter.grad = self._values(slot).fetch()
        _unhook_all(self._hooks)

    def _values(self, slot: Slot) -> HostValues:
        self.take(slot)
        grad = slot.parameter.grad
        assert isinstance(grad, HostGradient)
        return grad.host

    def _unhook(self, slot: Slot) -> None:
        self._hooks.pop(slot)[1].remove()


class _Taking:
    """A hook that holds neither the parameter nor the optimizer alive."""

    def __init__(self, owner: HostGradients, slot: Slot) -> None:
        self.owner = weakref.ref(owner)
        self._slot = weakref.ref(slot)

    @property
    def taker(self) -> Taker | None:
        """What it does, for other features."""
        return None if self.owner() is None else _OFFLOADING

    def __call__(self, parameter: torch.Tensor) -> None:
        owner, slot = self.owner(), self._slot()
        if owner is not None and slot is not None:
            owner.take(slot)


def _check_is_free(slot: Slot) -> None:
    takers = takers_of(slot.parameter)
    if _OFFLOADING in takers:
        raise ConfigError(
            f"the gradient of {slot.name} is moved to the host by another optimizer.",
            why="whichever of the two stepped first would drop it, and the other would not see it.",
            instead="give each parameter to one optimizer, or remove() the other one first.",
        )
    for other in takers:
        raise ConfigError(
            f"the gradient of {slot.name} is left to {other.verb}, and cannot be offloaded.",
            why=f"that {other.does}, and what has left for the host by then it does not find.",
            instead=f"leave offload_gradients off; or {other.instead}.",
        )


def _unhook_all(hooks: Hooks) -> None:
    for _, handle in hooks.values():
        handle.remove()
    hooks.clear()
