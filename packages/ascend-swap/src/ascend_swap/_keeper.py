"""The keeper that moves: which of the saved tensors go to the host, and which stay."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ascend_core.errors import HostMemoryError
from ascend_core.pinned import PinnedPool
from ascend_core.saved import Claim, Frame, StorageRecord, StorageTable, is_weight
from ascend_core.transfer import Transfer
from ascend_swap._belongings import Belongings
from ascend_swap._moved import Kept, Moved, MovedView
from ascend_swap._passes import LayerPass
from ascend_swap._traffic import Traffic

__all__ = ["MovingKeeper"]


class _Inside(threading.local):
    """The pass that this thread is in, and what belongs to the module that it called."""

    def __init__(self) -> None:
        self.now: tuple[LayerPass, Belongings] | None = None


class MovingKeeper:
    """Moves what is saved while a pass is entered.

    Args:
        traffic: The passes.
        pool: Host memory.
        min_bytes: The smallest storage that is moved.

    Attributes:
        moves: See `Keeper`.
    """

    moves = True

    def __init__(self, traffic: Traffic, pool: PinnedPool, min_bytes: int) -> None:
        self._traffic = traffic
        self._pool = pool
        self._min_bytes = min_bytes
        self._inside = _Inside()
        self._table = StorageTable()  # in a record's `made`: a weak reference to its `Moved`
        self._engines: dict[torch.device, Transfer] = {}
        self._has_warned = False

    @contextlib.contextmanager
    def inside(self, entered: LayerPass, belongings: Belongings) -> Iterator[None]:
        """Decide about what this thread saves, as a part of a pass."""
        before, self._inside.now = self._inside.now, (entered, belongings)
        try:
            yield
        finally:
            self._inside.now = before

    def open(self, frame: Frame) -> MovingKeeper:
        """Begin work in a frame: every frame is the same to it."""
        return self

    def close(self) -> None:
        """A frame ends, on which nothing hangs."""

    def claim(self, tensor: Tensor, record: StorageRecord) -> Claim | None:
        """See `Session.claim`."""
        if self._inside.now is None:
            return None
        entered, belongings = self._inside.now
        if not self._is_worth_it(tensor) or belongings.include(tensor) or is_weight(tensor):
            return None
        with self._traffic.lock:
            storage = tensor.untyped_storage()
            stays = storage.nbytes() <= entered.keeps or entered.has_kept(storage)
            moved = None if stays else self._moved(tensor, entered)
            if moved is None:
                entered.keep(storage)
                return Kept(tensor.detach(), entered)
            entered.add(moved)
        return MovedView(moved, entered)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        nbytes = tensor.untyped_storage().nbytes()
        # (A storage that does not end with an element could not be seen as elements of this size.)
        return nbytes >= self._min_bytes and nbytes % tensor.itemsize == 0

    def _moved(self, tensor: Tensor, entered: LayerPass) -> Moved | None:
        """What the tensor's storage was moved to, or is now; None where it stays.

        It stays where there is no room on the host, and where it has outlived what it was moved to
        before: then somebody holds it who is no graph (a mask, the angles of a rotary embedding).
        """
        record = self._table.track(tensor)
        moved: Moved | None = None
        if record.made is not None:
            moved = record.made()
            if moved is None:
                return None
        if moved is None or not moved.has(tensor):
            moved = self._send(tensor, entered)
            record.made = None if moved is None else weakref.ref(moved)
        return moved

    def _send(self, tensor: Tensor, entered: LayerPass) -> Moved | None:
        nbytes = tensor.untyped_storage().nbytes()
        try:
            host = self._engine(tensor.device).to_host(tensor, whole_storage=True)
        except HostMemoryError as error:
            self._traffic.counts.over_budget_bytes += nbytes
            self._warn(error)
            return None
        entered.send(nbytes, host)
        return Moved(tensor, host)

    def _engine(self, device: torch.device) -> Transfer:
        engine = self._engines.get(device)
        if engine is None:
            engine = self._engines[device] = Transfer(device, pool=self._pool, timing=True)
        return engine

    def _warn(self, error: HostMemoryError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "swap_attention leaves some activations on the device: the host has no room for "
                f"them. {error}",
                RuntimeWarning,
                stacklevel=2,
            )
