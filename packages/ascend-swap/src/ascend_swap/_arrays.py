"""How the state of a cohort lies on the host, and which ranges of it a window is.

[Note: one array for each kind of state]
All first moments of a cohort lie in one array, all second moments in another, and so on for each
dtype; parameters follow one another in the order in which they are walked, each beginning at a
multiple of 64 elements. So a window is one range of each array, moved by one copy for each array,
and a parameter is one range too, however many windows it is spread over: a checkpoint is made of
views, without a copy.

What is kept once for a parameter, a step count foremost, is kept once for each slice, since each
slice is stepped by itself. Kernels that read it on the device have it moved with the window; for
the others it stays on the host.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ascend_core.optim import GRID, MASTER, Cohort, CohortWindow, Entry, Slice, Slot, aligned
from ascend_core.streams import Event
from ascend_swap._stores import Lease, Store

__all__ = ["Array", "CohortArrays", "Range"]


class Range(NamedTuple):
    """A range of an array, in elements."""

    start: int
    stop: int


class _Key(NamedTuple):
    """Which array: one for each name and dtype; scalars apart by where they are read."""

    name: str
    dtype: torch.dtype
    is_scalar: bool
    moves: bool


@dataclasses.dataclass
class Array:
    """One kind of state of a cohort.

    Attributes:
        values: On the host, of one dimension.
        shown: The same memory with a storage of its own, so that who saves a view saves this array
            and not all that lies beside it in a slab. Only its users write through it.
        version: Of `shown`, when the scalars of all slices were equal.
        moves: Whether a window brings it to the device.
        windows: By window number, the range that belongs to it.
        places: By slot, the range of its elements, or of the scalars of its slices.
    """

    values: torch.Tensor
    shown: torch.Tensor
    version: int
    moves: bool
    windows: dict[int, Range]
    places: dict[Slot, Range]


class CohortArrays:
    """The host memory of a cohort.

    Args:
        cohort: Whose state it is.
        store: Where the memory comes from.

    Raises:
        HostMemoryError: When there is none. Nothing was taken.
    """

    def __init__(self, cohort: Cohort, store: Store) -> None:
        plans = _plan(cohort)
        sizes = [plan.length * key.dtype.itemsize for key, plan in plans.items()]
        self._leases: list[Lease] = store.lease(sizes)
        self._arrays = {
            key: Array(
                lease.memory.view(key.dtype),
                shown := _with_own_storage(lease.memory).view(key.dtype),
                shown._version,
                key.moves,
                plan.windows,
                plan.places,
            )
            for (key, plan), lease in zip(plans.items(), self._leases, strict=True)
        }
        for array, lease in zip(self._arrays.values(), self._leases, strict=True):
            # Whoever looks at the state keeps its memory from the next one who asks for some.
            weakref.finalize(array.shown.untyped_storage(), lease.release).atexit = False
        self._slots = cohort.slots
        for slot in cohort.slots:
            for entry in slot.entries:
                array, place = self._of(slot, entry)
                part = array.values[place.start : place.stop]
                if entry.name != MASTER:
                    part.fill_(entry.fill or 0.0)

    def moving(self, window: CohortWindow) -> Iterator[torch.Tensor]:
        """The ranges of host memory that a window is made of, in a fixed order."""
        for array in self._arrays.values():
            if array.moves and window.index in array.windows:
                begin, end = array.windows[window.index]
                yield array.values[begin:end]

    def window_bytes(self, window: CohortWindow) -> int:
        """Device memory that the moving ranges take, each aligned."""
        return sum(aligned(part.nbytes) for part in self.moving(window))

    def cut(
        self, window: CohortWindow, piece: Slice, moved: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Find a slice's elements and scalars in what was moved for its window.

        Args:
            window: The window.
            piece: One of its slices.
            moved: The window's ranges on the device, in the order of `moving`.

        Returns:
            Elements by entry name, and scalars by entry name. Scalars that do not move are copies.
        """
        slot = window.slot(piece)
        found = iter(moved)
        on_device = {
            key: (next(found), array.windows[window.index].start)
            for key, array in self._arrays.items()
            if array.moves and window.index in array.windows
        }
        elements, scalars = {}, {}
        for entry in slot.entries:
            key = _key(slot, entry)
            begin = self._arrays[key].places[slot].start
            if entry.is_scalar and not key.moves:
                scalars[entry.name] = self._arrays[key].values[begin + piece.number].clone()
                continue
            part, first = on_device[key]
            if entry.is_scalar:
                scalars[entry.name] = part[begin + piece.number - first]
            else:
                begin += piece.start - first
                elements[entry.name] = part[begin : begin + piece.numel]
        return elements, scalars

    def put_back(self, slot: Slot, piece: Slice, scalars: dict[str, torch.Tensor]) -> None:
        """Store the scalars that do not move."""
        for entry in slot.scalars:
            if not _key(slot, entry).moves:
                array, place = self._of(slot, entry)
                array.values[place.start + piece.number].copy_(scalars[entry.name])

    def elements(self, slot: Slot) -> dict[str, torch.Tensor]:
        """What is kept for each element of a slot: views of shape [numel]."""
        found = {}
        for entry in slot.elements:
            array, (start, _) = self._of(slot, entry)
            found[entry.name] = array.shown[start : start + slot.parameter.numel()]
        return found

    def scalars(self, slot: Slot) -> list[dict[str, torch.Tensor]]:
        """What is kept once for each slice of a slot: views of no dimension."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in range(slot.slices)]
        for entry in slot.scalars:
            array, place = self._of(slot, entry)
            for number, one in enumerate(found):
                one[entry.name] = array.shown[place.start + number]
        return found

    def scalars_were_written(self) -> bool:
        """Whether somebody wrote to what `scalars` gave since `spread_scalars`."""
        scalars = (array for key, array in self._arrays.items() if key.is_scalar)
        return any(array.shown._version != array.version for array in scalars)

    def spread_scalars(self) -> None:
        """Give all slices of a slot the scalars of its first one. No copy may be under way."""
        for slot in self._slots:
            for entry in slot.scalars:
                array, (start, stop) = self._of(slot, entry)
                array.values[start:stop] = array.values[start].clone()
                array.version = array.shown._version

    def used_by(self, *copies: Event) -> None:
        """Note the copies that were queued last, for whoever gets this memory next."""
        for lease in self._leases:
            lease.used_by(*copies)

    def release(self) -> None:
        """Give the memory back, when no copy uses it and nobody looks at it any more."""
        self._arrays.clear()

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.values.nbytes for array in self._arrays.values())

    def _of(self, slot: Slot, entry: Entry) -> tuple[Array, Range]:
        array = self._arrays[_key(slot, entry)]
        return array, array.places[slot]


def _with_own_storage(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes, as the whole of a storage."""
    begin = memory.storage_offset()
    storage: Any = memory.untyped_storage()[begin : begin + memory.numel()]
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


@dataclasses.dataclass
class _Plan:
    """The lengths of an array before there is memory for it, in elements."""

    length: int = 0
    windows: dict[int, Range] = dataclasses.field(default_factory=dict)
    places: dict[Slot, Range] = dataclasses.field(default_factory=dict)

    def cover(self, window: int, start: int, stop: int) -> None:
        old = self.windows.get(window, Range(start, stop))
        self.windows[window] = Range(min(old.start, start), max(old.stop, stop))


def _plan(cohort: Cohort) -> dict[_Key, _Plan]:
    """Lay out every array of a cohort. Pure arithmetic."""
    plans: dict[_Key, _Plan] = {}
    for slot in cohort.slots:
        for entry in slot.entries:
            plan = plans.setdefault(_key(slot, entry), _Plan())
            length = slot.slices if entry.is_scalar else slot.parameter.numel()
            plan.places[slot] = Range(plan.length, plan.length + length)
            plan.length += length if entry.is_scalar else -(-length // GRID) * GRID
    for window in cohort.windows:
        for piece in window.slices:
            slot = window.slot(piece)
            for entry in slot.entries:
                plan = plans[_key(slot, entry)]
                begin = plan.places[slot].start
                if entry.is_scalar:
                    plan.cover(window.index, begin + piece.number, begin + piece.number + 1)
                else:
                    plan.cover(window.index, begin + piece.start, begin + piece.stop)
    return plans


def _key(slot: Slot, entry: Entry) -> _Key:
    if not entry.is_scalar:
        return _Key(entry.name, slot.dtype, is_scalar=False, moves=True)
    return _Key(entry.name, slot.scalar_dtype, is_scalar=True, moves=slot.moves_scalars)
