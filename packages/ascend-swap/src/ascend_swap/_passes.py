"""One call of one layer, from its forward until autograd has dropped what it saved."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ascend_core.streams import Event
from ascend_core.transfer import HostCopy, Transfer
from ascend_swap._moved import Moved

if TYPE_CHECKING:
    from ascend_swap._traffic import Traffic

__all__ = ["LayerPass"]


class Tally:
    """Bytes of the tensors that a pass saved.

    Attributes:
        moved: Copied to the host.
        kept: Stayed on the device.
    """

    def __init__(self) -> None:
        self.moved = self.kept = 0


class LayerPass:
    """What one call of a layer saved. Held by that, and by the call while it runs.

    Args:
        traffic: All passes of the model.
        layer: Which layer, by position among the chosen ones.
        number: Of the pass.
        keeps: The largest storage that stays on the device, in bytes.

    Attributes:
        called: The modules of the layer whose calls belong to this pass, by number.
        task: The backward that reached it last; None before.
        left: The end of its last copy to the host, with its time, and what copied it.
        largest: The largest storage that it moved, in bytes.
        tally: See there.
    """

    def __init__(self, traffic: Traffic, layer: int, number: int, *, keeps: float) -> None:
        self.traffic = traffic
        self.layer = layer
        self.number = number
        self.keeps = keeps
        self.called: set[int] = set()
        self.task: int | None = None
        self.left: tuple[Event, Transfer] | None = None
        self.largest = 0
        self.tally = Tally()
        self._moved: list[weakref.ref[Moved]] = []
        self._kept: set[int] = set()

    def add(self, moved: Moved) -> None:
        """Take in a storage of which a view was saved."""
        self._moved.append(weakref.ref(moved))

    def send(self, nbytes: int, host: HostCopy) -> None:
        """Count a storage of so many bytes whose copy to the host was queued."""
        self.left = host.last_use[0], host.engine
        self.largest = max(self.largest, nbytes)
        self.tally.moved += nbytes

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Take in a storage that stays."""
        if not self.has_kept(storage):
            self._kept.add(storage._cdata)
            self.tally.kept += storage.nbytes()

    def has_kept(self, storage: torch.UntypedStorage) -> bool:
        """Whether a view of a storage that stays was saved before."""
        return storage._cdata in self._kept  # it lives as long as the pass: no address comes twice

    def moved(self) -> list[Moved]:
        """What autograd still holds, each once, latest save first: so does backward ask for it."""
        every = (reference() for reference in reversed(self._moved))
        return list(dict.fromkeys(moved for moved in every if moved is not None))
