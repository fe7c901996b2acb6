"""How an FP32 master and its weight become one another.

[Note: a weight that somebody else wrote]
The weight should be its master, rounded. Where its bits are not, it was written by somebody else (a
checkpoint, an EMA, a broadcast, a flat buffer that it lies in), and the written value becomes the
master. This is decided on the device, when the master is asked for; the host never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ascend_core.optim.arena import Arena, aligned
from ascend_core.optim.home import MASTER, Held, Slot

__all__ = ["Kernel", "Masters", "StoredMasters"]


class Masters(Protocol):
    """Gives the masters of a step, and takes them back. Nothing is allocated but from scratch."""

    def kept_bytes(self, numel: int) -> int:
        """How much of scratch the master of a slice takes, from `open` to `write`."""

    def opening_bytes(self, slot: Slot, numel: int) -> int:
        """How much of scratch `open` takes beside, and gives back at once."""

    def writing_bytes(self, slot: Slot, numel: int) -> int:
        """How much of scratch `write` takes, and gives back at once."""

    def open(self, held: Held, weight: torch.Tensor, scratch: Arena) -> torch.Tensor:
        """The master of a slice, true to its weight: FP32, [numel]."""

    def write(self, held: Held, weight: torch.Tensor, master: torch.Tensor, scratch: Arena) -> None:
        """Round a master that was stepped into its weight. May be repeated."""

    def read(self, slot: Slot) -> torch.Tensor:
        """The whole master as it would be saved: FP32, [numel]. Blocks the host."""

    def load(self, slot: Slot, master: torch.Tensor | None) -> None:
        """Take a whole master, in the parameter's own shape; the weight where there is none."""


class Kernel(Protocol):
    """Steps slices in one pass, to the bits of the wrapped optimizer's own step."""

    def takes(self, slot: Slot, gradient: torch.dtype) -> bool:
        """Whether it has this step, with the options of now."""

    def step(self, held: Held, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step a slice, its weight and its state, in place.

        Args:
            held: The slice.
            weight: In the parameter's dtype, [numel].
            gradient: Unscaled and clipped, [numel].
        """


class StoredMasters:
    """Masters that a home stores among its elements.

    Args:
        elements: `Home.elements` of that home.
    """

    def __init__(self, elements: Callable[[Slot], dict[str, torch.Tensor]]) -> None:
        self._elements = elements

    def kept_bytes(self, numel: int) -> int:
        """Nothing: the master is there."""
        return 0

    def writing_bytes(self, slot: Slot, numel: int) -> int:
        """Nothing."""
        return 0

    def opening_bytes(self, slot: Slot, numel: int) -> int:
        """The weight widened, the master rounded, and where the two are the same."""
        rounded = numel * slot.parameter.dtype.itemsize
        return aligned(numel * slot.dtype.itemsize) + aligned(rounded) + aligned(numel)

    def open(self, held: Held, weight: torch.Tensor, scratch: Arena) -> torch.Tensor:
        """Put the weight into the master where its bits are not the master's, rounded."""
        master = held.elements[MASTER]
        with scratch.passing():
            wide = scratch.take(master.numel(), master.dtype)
            rounded = scratch.take(master.numel(), weight.dtype).copy_(master)
            is_same = scratch.take(master.numel(), torch.bool)
            torch.eq(rounded.view(torch.int16), weight.view(torch.int16), out=is_same)
            torch.where(is_same, master, wide.copy_(weight), out=master)
        return master

    def write(self, held: Held, weight: torch.Tensor, master: torch.Tensor, scratch: Arena) -> None:
        """Round the master into its weight."""
        weight.copy_(master)

    def read(self, slot: Slot) -> torch.Tensor:
        """The master itself, live."""
        return self._elements(slot)[MASTER]

    def load(self, slot: Slot, master: torch.Tensor | None) -> None:
        """Copy a master to where it is stored."""
        stored = self._elements(slot)[MASTER]
        if master is None:
            # Moved before it is widened: the device would need memory for it.
            stored.copy_(slot.flat().to(stored.device))
        else:
            slot.shaped(stored).copy_(master)
