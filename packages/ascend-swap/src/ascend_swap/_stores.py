"""Where the host keeps optimizer state: page-locked memory, or files that are mapped to memory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ascend_core.errors import BudgetExceededError, ConfigError, HostMemoryError
from ascend_core.pinned import HostBuffer, PinnedPool
from ascend_core.streams import Event

__all__ = ["DiskStore", "Lease", "PinnedStore", "Store"]

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Lease(Protocol):
    """Host memory that a store handed out."""

    @property
    def memory(self) -> torch.Tensor:
        """uint8 of shape [nbytes]."""

    def used_by(self, *copies: Event) -> None:
        """Note the copies that were queued last."""

    def release(self) -> None:
        """Give the memory back, when no copy uses it."""


class Store(Protocol):
    """Hands out host memory."""

    def lease(self, sizes: Sequence[int]) -> list[Lease]:
        """Hand out memory of several sizes that no copy uses any more, or none at all.

        May block the host, where the memory served somebody else a moment ago.

        Args:
            sizes: In bytes.

        Raises:
            BudgetExceededError: When together they are more than the budget allows.
            HostMemoryError: When the host has no room for them.
        """

    def reserved_bytes(self) -> int:
        """Bytes that are taken from the host, with what rounding adds."""


class PinnedStore:
    """Page-locked memory of a pool.

    Args:
        pool: May be shared with others.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool

    def lease(self, sizes: Sequence[int]) -> list[Lease]:
        """See `Store.lease`."""
        taken: list[Lease] = []
        try:
            for size in sizes:
                taken.append(_PinnedLease(self._pool.allocate(size)))
        except HostMemoryError as error:
            for one in taken:
                one.release()
            self._pool.trim()
            total = self.reserved_bytes() + sum(map(self._pool.slab_bytes_for, sizes))
            kind = type(error)
            raise kind(
                f"the optimizer's state needs {sum(sizes)} bytes of host memory, and there is no "
                "room for it.",
                why=f"{error.what} {error.why or ''}".strip(),
                instead=f"raise host_budget_bytes to {total}, give a disk, or shard the optimizer "
                "over more ranks.",
            ) from error
        return taken

    def reserved_bytes(self) -> int:
        """See `Store.reserved_bytes`."""
        return self._pool.stats().reserved_bytes


class _PinnedLease:
    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        buffer.wait()
        self.memory = buffer.tensor

    def used_by(self, *copies: Event) -> None:
        self._buffer.used_by(*copies)

    def release(self) -> None:
        self._buffer.release()


class DiskStore:
    """Files mapped to memory. They are unlinked at once, so that nothing is left behind.

    The space is reserved when a file is made: a disk that fills up later does no harm.

    Args:
        folder: On the disk that is to be used.
        budget_bytes: The most bytes of all files together.

    Raises:
        ConfigError: When there is no such folder.
    """

    def __init__(self, folder: Path, budget_bytes: int | None = None) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"disk is {str(folder)!r}, and there is no such folder.",
                instead="make it first, on a fast local disk.",
            )
        self._folder = folder
        self._budget = budget_bytes
        self._reserved = 0

    def lease(self, sizes: Sequence[int]) -> list[Lease]:
        """See `Store.lease`."""
        total = sum(sizes)
        if self._budget is not None and self._reserved + total > self._budget:
            raise BudgetExceededError(
                f"the optimizer's state needs {total} bytes on disk, and "
                f"{self._budget - self._reserved} are available.",
                why=f"the budget is {self._budget} bytes, of which {self._reserved} are in use.",
                instead="raise host_budget_bytes.",
            )
        taken: list[Lease] = []
        try:
            for size in sizes:
                taken.append(_DiskLease(self, size))
        except OSError as error:
            for one in taken:
                one.release()
            if error.errno not in _FULL:
                raise ConfigError(
                    f"disk is {str(self._folder)!r}, and no file for the state can be made there.",
                    why=str(error),
                    instead="choose a folder that you may write to, on a fast local disk.",
                ) from error
            raise HostMemoryError(
                f"the optimizer's state needs {total} bytes on disk, and {self._folder} has no "
                "room for it.",
                why=str(error),
                instead="free space there, or choose a folder on a larger disk.",
            ) from error
        return taken

    def reserved_bytes(self) -> int:
        """See `Store.reserved_bytes`."""
        return self._reserved

    def make_file(self, nbytes: int) -> torch.Tensor:
        """Map a new file of that size, and take its name away."""
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix="optimizer-state-")
        try:
            os.posix_fallocate(descriptor, 0, max(nbytes, 1))
            mapped = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(descriptor)
            Path(name).unlink()
        self._reserved += nbytes
        return mapped

    def return_file(self, nbytes: int) -> None:
        """Count a file as gone."""
        self._reserved -= nbytes


class _DiskLease:
    def __init__(self, store: DiskStore, nbytes: int) -> None:
        self._store = store
        self._nbytes = nbytes
        self.memory = store.make_file(nbytes)

    def used_by(self, *copies: Event) -> None:
        """Nothing to note: a mapping lives as long as a tensor looks at it."""

    def release(self) -> None:
        self._store.return_file(self._nbytes)
        self._nbytes = 0
