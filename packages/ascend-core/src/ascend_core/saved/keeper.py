"""The interface that a feature implements to decide about saved tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ascend_core.layout import Layout
    from ascend_core.saved._frame import Frame
    from ascend_core.saved._records import StorageRecord


class Claim(Protocol):
    """A keeper's promise to bring one saved tensor back."""

    def value(self, layout: Layout) -> Tensor:
        """The saved tensor: same shape, strides, dtype, device and bits as when it was saved.

        Args:
            layout: The layout that it was saved with.

        Called once per unpack, with grad recording off, on the thread that runs backward.
        """


class Session(Protocol):
    """A keeper at work in one frame; it is used by one thread while the frame is open."""

    def claim(self, tensor: Tensor, record: StorageRecord) -> Claim | None:
        """Take over a saved tensor, or return None to leave it to the next keeper.

        Args:
            tensor: What autograd saves; it may be a view. A claim must not hold it, only an alias
                made by `detach()`: a node's own output held by its saved value is a cycle that
                no collector frees.
            record: What the frame knows of its storage; this save is not yet noted there.
        """

    def close(self) -> None:
        """The frame ends: no more tensors come. Claims that were made stay good."""


class Keeper(Protocol):
    """A feature's decision about saved tensors; one object may serve many threads and frames.

    Attributes:
        moves: Whether claims move bytes elsewhere. Such a keeper stands aside while a backward
            runs (what a reentrant checkpoint saves there is needed at once) and in a frame over
            somebody else's hooks (a non-reentrant checkpoint counts what it is offered, and must
            be offered the same in its recomputation).
    """

    moves: bool

    def open(self, frame: Frame) -> Session:
        """Begin work in a frame."""
