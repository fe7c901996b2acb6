"""What a frame knows of the storages it has seen, for as long as each lives."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage

if TYPE_CHECKING:
    from ascend_core.saved._packed import Saved


# So many saves of one storage are noted before those that are gone are dropped.
_MANY = 16


class StorageRecord(weakref.ref[UntypedStorage]):
    """One storage: who saved it, and what a keeper knows of how it was made.

    [Note: lifetimes, not pointers]
    A storage is found by its address, but an address is used again as soon as its storage dies.
    The record is a weak reference to the storage object (PyTorch keeps that object for the whole
    life of the storage, also when only autograd owns it), and is forgotten with it.

    Attributes:
        key: The address by which the table finds it.
        made: What a keeper noted about the making of its present contents, or None.
    """

    __slots__ = ("_saved", "key", "made")

    key: int
    made: Any
    _saved: list[weakref.ref[Saved]] | None

    # A weak reference compares and hashes as what it refers to; a record is only itself.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def note(self, packed: Saved) -> None:
        """Remember that autograd holds `packed`, for as long as it does."""
        saved = self._saved
        if saved is None:
            self._saved = [weakref.ref(packed)]
            return
        if len(saved) >= _MANY:
            saved[:] = [reference for reference in saved if reference() is not None]
        saved.append(weakref.ref(packed))

    def latest(self) -> Saved | None:
        """The latest save of this storage, when autograd still holds it."""
        return self._saved[-1]() if self._saved else None

    def saved(self, version: int) -> list[Saved]:
        """What autograd holds now of this storage at `version`, latest save first."""
        held: list[Saved] = []
        for reference in reversed(self._saved or ()):
            packed = reference()
            if packed is not None and packed.version == version:
                held.append(packed)
        return held


class StorageTable:
    """The records of one frame, by storage."""

    def __init__(self) -> None:
        self._records: dict[int, StorageRecord] = {}
        self._forget = _forgetter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def find(self, tensor: Tensor) -> StorageRecord | None:
        """The record of the tensor's storage, when the frame has seen it before."""
        storage = tensor.untyped_storage()
        record = self._records.get(storage._cdata)
        return record if record is not None and record() is storage else None

    def track(self, tensor: Tensor) -> StorageRecord:
        """The record of the tensor's storage, made when the frame sees it for the first time.

        Raises:
            NotImplementedError: When the tensor has no storage (sparse layouts).
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._records.get(key)
        if record is None or record() is not storage:
            record = self._records[key] = StorageRecord(storage, self._forget)
            record.key = key
            record.made = None
            record._saved = None
        return record

    def clear(self) -> None:
        """Forget every storage."""
        self._records.clear()


def _forgetter(records: dict[int, StorageRecord]) -> Any:
    def forget(dead: StorageRecord) -> None:
        # The address may be in use again, by a storage with a record of its own.
        if records.get(dead.key) is dead:
            del records[dead.key]

    return forget
