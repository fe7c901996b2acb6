"""What takes the place of a tensor that autograd saved.

[Note: the life of a storage that is moved]
    forward   A tensor is saved. Its whole storage is copied to the host, once, however many views
              of it are saved. `Moved` owns the host memory and knows the storage only weakly: when
              the model has dropped it too, its memory is free as soon as the copy has read it.
    between   `Moved` is held by the views that autograd holds, and by nothing else. When the graph
              dies, whether backward came or not, so does the host copy.
    backward  `fetch` brings all of the storage back, ahead of need if its layer was expected. Each
              view is cut from that one copy. With the last view, which autograd drops as soon as
              the node that asked for it has run, the device memory and the host memory go.

A storage that somebody else kept alive all the time is not copied back: it is still there.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ascend_core.layout import Layout
from ascend_core.storage import hollow, share_version
from ascend_core.transfer import DeviceCopy, HostCopy

if TYPE_CHECKING:
    from ascend_swap._passes import LayerPass

__all__ = ["Kept", "Moved", "MovedView"]


class Moved:
    """A storage at one version, whose bytes wait on the host.

    Args:
        tensor: A view of the storage. It is not held.
        host: The copy of all of the storage.

    Attributes:
        nbytes: Of the storage.
        engine: What copies it.
        is_awaited: Whether a stream waits, or has waited, for it to be back.
    """

    __slots__ = (
        "__weakref__", "_device_copy", "_host", "_probe", "_storage", "_version", "engine",
        "is_awaited", "nbytes",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, host: HostCopy) -> None:
        storage = tensor.untyped_storage()
        self._probe = hollow(tensor)
        self._version: int = tensor._version
        self.nbytes = storage.nbytes()
        self.engine = host.engine
        self.is_awaited = False
        self._storage = weakref.ref(storage)
        self._host = host
        self._device_copy: DeviceCopy | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes are those that a view of the storage has now.

        Not when it was written to since, nor when its version would not have told.
        """
        return self._version == tensor._version and share_version(self._probe, tensor)

    @property
    def is_fetched(self) -> bool:
        """Whether the bytes are on the device again, or on their way."""
        return self._device_copy is not None

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage itself, when somebody else held it all the time."""
        storage = self._storage()
        # Whoever gave the bytes back may have kept the storage object.
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def fetch(self) -> DeviceCopy:
        """Start copying back, unless that has been done. Allocates `nbytes` on the device.

        Raises:
            torch.OutOfMemoryError: When the device has no memory; the host copy is as it was.
        """
        if self._device_copy is None:
            self._device_copy = self._host.fetch()
        return self._device_copy

    def drop(self) -> None:
        """Give the device memory back; the host copy stays."""
        self._device_copy = None
        self.is_awaited = False


class MovedView:
    """The claim on one saved view of a moved storage.

    Args:
        moved: The storage.
        owner: The pass that saved the view.
    """

    __slots__ = ("_moved", "_owner")

    def __init__(self, moved: Moved, owner: LayerPass) -> None:
        self._moved = moved
        self._owner = owner

    def value(self, layout: Layout) -> torch.Tensor:
        """See `Claim.value`. Makes the current stream wait for the copy back."""
        traffic = self._owner.traffic
        with traffic.lock:
            traffic.reached(self._owner)
            storage = self._moved.storage
            if storage is not None:
                return layout.over(storage)
            copy = self._moved.fetch()
            if not self._moved.is_awaited:  # later views of it find it there
                self._moved.is_awaited = True
                traffic.waits_for(copy, self._moved.engine)
        return copy.wait(layout)


class Kept:
    """The claim on a saved tensor that stays on the device: it only says when backward comes.

    Args:
        alias: The tensor, detached.
        owner: The pass that saved it.
    """

    __slots__ = ("_alias", "_owner")

    def __init__(self, alias: torch.Tensor, owner: LayerPass) -> None:
        self._alias = alias
        self._owner = owner

    def value(self, layout: Layout) -> torch.Tensor:
        """See `Claim.value`."""
        traffic = self._owner.traffic
        with traffic.lock:
            traffic.reached(self._owner)
        return self._alias
