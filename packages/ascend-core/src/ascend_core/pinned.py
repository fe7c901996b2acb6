"""A pool of host memory for what waits on the host, page-locked where that can be had.

[Note: who owns a byte of the pool]
A *slab* is one host allocation; the pool holds it until `trim` or `close`. A *buffer* is a range
of a slab that was handed out; it comes back when `release` is called or the `HostBuffer` dies,
whichever is first. A *piece* is a range that nobody holds.

A copy that uses a buffer may still be running on the device when the buffer comes back. The pool
neither waits for it nor sets the range aside: the piece remembers the event of its last copy, the
next buffer cut from it carries that event in `last_use`, and whoever fills that buffer makes its
*stream* wait for it (`ascend_core.transfer` does). So a pool's size follows from the order of the
calls alone and not from how far the device lags behind, and the host blocks nowhere.

Torch rounds each page-locked allocation up to a power of two. Slabs are such powers, so what is
counted against the budget is what is really reserved, and what a buffer leaves of its slab is cut
for others.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
import warnings
import weakref
from collections import deque

import torch

from ascend_core.device import current_backend
from ascend_core.errors import BudgetExceededError, ConfigError, HostMemoryError
from ascend_core.streams import Event

__all__ = ["HostBuffer", "PinnedPool", "PoolStats"]

_ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype and for Ascend's copy engine


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """What a pool holds and did.

    Attributes:
        reserved_bytes: Bytes of all slabs.
        in_use_bytes: Bytes of the buffers handed out, alignment included.
        peak_reserved_bytes: The highest `reserved_bytes` so far.
        peak_in_use_bytes: The highest `in_use_bytes` so far.
        slabs: How many slabs there are.
        allocations: How many buffers were handed out so far.
        reuses: How many of them needed no new slab.
        pinned: Whether all slabs are page-locked; false while there are none.
    """

    reserved_bytes: int
    in_use_bytes: int
    peak_reserved_bytes: int
    peak_in_use_bytes: int
    slabs: int
    allocations: int
    reuses: int
    pinned: bool


@dataclasses.dataclass(slots=True)
class _Piece:
    """A free range of a slab, in bytes, and the copies that may still use it."""

    start: int
    stop: int
    last_use: tuple[Event, ...] = ()


class _Slab:
    """One host allocation: `memory` is uint8, `pieces` its free ranges in the order of address."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.pieces = [_Piece(0, memory.numel())]

    @property
    def is_free(self) -> bool:
        return sum(piece.stop - piece.start for piece in self.pieces) == self.memory.numel()

    def cut(self, nbytes: int) -> _Lease | None:
        """Take the start of the first run of adjoining pieces that holds `nbytes`."""
        first = 0
        for i, piece in enumerate(self.pieces):
            if i > first and self.pieces[i - 1].stop != piece.start:
                first = i
            start = self.pieces[first].start
            stop = start + nbytes
            if piece.stop >= stop:
                events = [event for p in self.pieces[first : i + 1] for event in p.last_use]
                rest = [_Piece(stop, piece.stop, piece.last_use)] if piece.stop > stop else []
                self.pieces[first : i + 1] = rest
                return _Lease(self, start, stop, tuple(events))
        return None

    def give_back(self, lease: _Lease) -> None:
        """Put a range back and join it with its neighbours as far as no copy may still run."""
        i = bisect.bisect_left(self.pieces, lease.start, key=lambda piece: piece.start)
        self.pieces.insert(i, _Piece(lease.start, lease.stop, lease.last_use))
        near = slice(max(i - 1, 0), i + 2)
        for piece in self.pieces[near]:
            if piece.last_use:
                piece.last_use = tuple(event for event in piece.last_use if not event.query())
        self.pieces[near] = _joined(self.pieces[near])

    def wait(self) -> None:
        """Block the host until no copy uses a free range."""
        for piece in self.pieces:
            for event in piece.last_use:
                event.synchronize()
            piece.last_use = ()
        self.pieces = _joined(self.pieces)


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    joined = pieces[:1]
    for piece in pieces[1:]:
        last = joined[-1]
        if last.stop == piece.start and not last.last_use and not piece.last_use:
            last.stop = piece.stop
        else:
            joined.append(piece)
    return joined


@dataclasses.dataclass(slots=True)
class _Lease:
    """The range behind a buffer: what goes back to the pool when the buffer does."""

    slab: _Slab | None  # None for a buffer of no bytes
    start: int
    stop: int
    last_use: tuple[Event, ...] = ()


class _Returns:
    """Where leases wait until the pool is next called.

    A finalizer may run at any point of any thread, also inside the pool's own lock; so it takes
    no lock and touches no piece, and only appends to a deque.
    """

    def __init__(self) -> None:
        self.leases: deque[_Lease] = deque()
        self.is_open = True

    def add(self, lease: _Lease) -> None:
        if self.is_open:
            self.leases.append(lease)


class HostBuffer:
    """A range of a pool's host memory, until `release` or the death of this object.

    Attributes:
        tensor: uint8 of shape [nbytes]. Not to be used once the buffer is released or dead.
        lock: To be held from reading `last_use` until `used_by` has noted the copy that follows.
    """

    def __init__(self, tensor: torch.Tensor, lease: _Lease, returns: _Returns) -> None:
        self.tensor = tensor
        self.lock = threading.Lock()
        self._lease = lease
        self._finalizer = weakref.finalize(self, returns.add, lease)
        self._finalizer.atexit = False

    @property
    def is_released(self) -> bool:
        """Whether the memory belongs to the pool again."""
        return not self._finalizer.alive

    @property
    def last_use(self) -> tuple[Event, ...]:
        """The copies that must have ended before the memory is read or written."""
        return self._lease.last_use

    def used_by(self, *copies: Event) -> None:
        """Note the copies that were queued last, behind a wait for every event of `last_use`."""
        self._lease.last_use = copies

    def wait(self) -> None:
        """Block the host until the last copy that uses the memory has ended."""
        for event in self._lease.last_use:
            event.synchronize()

    def release(self) -> None:
        """Give the memory back. A copy under way goes on unharmed; a second call does nothing."""
        self._finalizer()


class PinnedPool:
    """Reused host memory with a byte budget. May be shared by devices, engines and threads.

    Args:
        budget_bytes: The most that all slabs together may reserve; no limit when left out.
        pin: Whether to page-lock. Left out: where the machine has an accelerator. Where
            page-locking fails the pool goes on with pageable memory, and warns once.
        slab_bytes: The size of a slab, when the budget allows and no buffer needs a larger one.

    Raises:
        ConfigError: When a number of bytes is not positive.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        pin: bool | None = None,
        slab_bytes: int = 32 << 20,
    ) -> None:
        _check_positive("budget_bytes", budget_bytes)
        _check_positive("slab_bytes", slab_bytes)
        self._budget = budget_bytes
        self._pin = pin
        self._slab_bytes = _aligned(slab_bytes)
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._returns = _Returns()
        self._reserved = self._peak_reserved = 0
        self._in_use = self._peak_in_use = 0
        self._allocations = self._reuses = 0

    def allocate(self, nbytes: int) -> HostBuffer:
        """Hand out a buffer. Its content is undefined; see `HostBuffer.last_use` before writing.

        Raises:
            ConfigError: When `nbytes` is negative.
            BudgetExceededError: When the pool would have to reserve more than its budget. No
                buffer was touched.
            HostMemoryError: When the host has no memory left, or the pool was closed.
        """
        if nbytes < 0:
            raise ConfigError(f"a buffer cannot have {nbytes} bytes.")
        size = _aligned(nbytes)
        with self._lock:
            self._take_returns()
            lease = self._reuse(size)
            self._reuses += lease is not None
            lease = lease or self._grow(size)
            self._allocations += 1
            self._in_use += size
            self._peak_in_use = max(self._peak_in_use, self._in_use)
        memory = (
            lease.slab.memory if lease.slab else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return HostBuffer(memory.narrow(0, lease.start, nbytes), lease, self._returns)

    def slab_bytes_for(self, nbytes: int) -> int:
        """What a slab of its own for a buffer of that many bytes would reserve."""
        size = _aligned(nbytes)
        pins = current_backend().can_pin if self._pin is None else self._pin
        return _power_of_two(size) if pins and size else size

    def stats(self) -> PoolStats:
        """What the pool holds now, with every buffer that came back counted as free."""
        with self._lock:
            self._take_returns()
            return PoolStats(
                reserved_bytes=self._reserved,
                in_use_bytes=self._in_use,
                peak_reserved_bytes=self._peak_reserved,
                peak_in_use_bytes=self._peak_in_use,
                slabs=len(self._slabs),
                allocations=self._allocations,
                reuses=self._reuses,
                pinned=bool(self._slabs) and all(s.memory.is_pinned() for s in self._slabs),
            )

    def trim(self) -> int:
        """Give slabs that hold no buffer back to torch, and return how many bytes they had.

        Blocks the host until the copies that used them have ended. Page-locked memory stays in
        torch's own host cache: `torch.accelerator.empty_host_cache()` returns it to the system.
        """
        with self._lock:
            self._take_returns()
            return self._drop_free_slabs()

    def close(self) -> None:
        """Give everything back. A second call does nothing.

        Blocks the host until the copies that used free memory have ended. Buffers that are still
        held stay valid until they are released; their memory goes with them.
        """
        with self._lock:
            self._returns.is_open = False
            self._take_returns()
            self._drop_free_slabs()
            self._slabs.clear()
            self._reserved = self._in_use = 0

    def _take_returns(self) -> None:
        while self._returns.leases:
            lease = self._returns.leases.popleft()
            if lease.slab is not None:
                lease.slab.give_back(lease)
            self._in_use -= lease.stop - lease.start

    def _reuse(self, size: int) -> _Lease | None:
        if not self._returns.is_open:
            raise HostMemoryError("the host pool is closed.", instead="make a new PinnedPool.")
        if size == 0:
            return _Lease(None, 0, 0)
        return next((lease for slab in self._slabs if (lease := slab.cut(size))), None)

    def _grow(self, size: int) -> _Lease:
        slab = _Slab(self._host_memory(size))
        self._slabs.append(slab)
        self._reserved += slab.memory.numel()
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        lease = slab.cut(size)
        assert lease is not None, "a slab is at least as large as the buffer it was made for"
        return lease

    def _host_memory(self, size: int) -> torch.Tensor:
        """Reserve a slab for at least `size` bytes: pinned, else pageable after one warning."""
        if self._pin is None:
            self._pin = current_backend().can_pin
        if self._pin:
            nbytes = self._slab_size(size)
            try:
                return _empty(nbytes, pin=True)
            except RuntimeError as error:
                self._pin = False
                warnings.warn(
                    f"host memory cannot be page-locked, so copies to and from the host will not "
                    f"overlap with compute: {_first_line(error)}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        nbytes = self._slab_size(size)
        try:
            return _empty(nbytes, pin=False)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the host has no {nbytes} bytes left.",
                why=f"the pool holds {self._reserved} bytes; {_first_line(error)}",
                instead="move less to the host, or set a budget that it can hold.",
            ) from error

    def _slab_size(self, size: int) -> int:
        """Choose the size of a new slab, giving up free slabs when the budget has no room else.

        Raises:
            BudgetExceededError: When even the smallest slab for `size` bytes does not fit.
        """
        least = _power_of_two(size) if self._pin else size
        usual = max(least, _power_of_two(self._slab_bytes) if self._pin else self._slab_bytes)
        if self._budget is None:
            return usual
        if self._reserved + least > self._budget:
            self._drop_free_slabs()
        room = self._budget - self._reserved
        if least > room:
            raise self._over_budget(size, least, room)
        return min(
            usual, _power_of_two(room + 1) // 2 if self._pin else room // _ALIGNMENT * _ALIGNMENT
        )

    def _over_budget(self, size: int, least: int, room: int) -> BudgetExceededError:
        rounded = f" ({least} once page-locked, a power of two)" if least > size else ""
        return BudgetExceededError(
            f"the host pool needs {size} bytes{rounded} and has {room} available.",
            why=f"its budget is {self._budget} bytes; {self._reserved} are reserved for slabs that "
            f"hold {self._in_use} bytes in use.",
            instead=f"raise the budget to at least {self._reserved + least} bytes, move less to "
            f"the host, or release buffers first.",
        )

    def _drop_free_slabs(self) -> int:
        free = [slab for slab in self._slabs if slab.is_free]
        for slab in free:
            slab.wait()
            self._slabs.remove(slab)
            self._reserved -= slab.memory.numel()
        return sum(slab.memory.numel() for slab in free)


def _empty(nbytes: int, *, pin: bool) -> torch.Tensor:
    # A slab that is made in inference mode could not be written outside it.
    with torch.inference_mode(mode=False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(nbytes: int) -> int:
    """Round up to a power of two."""
    return 1 << (nbytes - 1).bit_length()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{name} is {value}.", why="it is a number of bytes above 0.")
