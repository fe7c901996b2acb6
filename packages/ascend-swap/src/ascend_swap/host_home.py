"""A home on the host: state comes to the device for its window, and goes back.

[Note: who owns a window's memory when]
The device holds a *ring* of at most three buffers, allocated when a step begins and given back when
it ends. Window k lives in buffer k mod 3.

* `fetch(k)` queues the way in on the inward stream. It waits for the way out of window k - 3, which
  read the same buffer, and for the last way out of window k itself, which wrote the host memory it
  is about to read.
* `enter(k)` makes the compute stream wait for the way in.
* `leave(k)` queues the way out on the outward stream, behind the compute that is queued by then.

Since k + 1 is fetched before k is entered, one window comes in and one goes out while a third is
computed; the host blocks nowhere. When the step ends the buffers are dropped at once, and the
allocator keeps them from reuse until the ways out have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ascend_core.errors import ConfigError
from ascend_core.optim import (
    MASTER,
    Arena,
    Cohort,
    CohortWindow,
    Held,
    Kernel,
    Masters,
    Slot,
    StoredMasters,
)
from ascend_core.streams import Event
from ascend_core.transfer import Transfer
from ascend_swap._arrays import CohortArrays
from ascend_swap._stores import Store

__all__ = ["HostHome"]

_RING = 3


class HostHome:
    """Keeps state in host memory. Between steps the device holds none of it.

    Args:
        device: Of the parameters.
        store: Where host memory comes from.
    """

    in_place = False
    early = True
    kernel: Kernel | None = None

    def __init__(self, device: torch.device, store: Store) -> None:
        self.transfer = Transfer(device)
        self.masters: Masters = StoredMasters(self.elements)
        self._store = store
        self._arrays: dict[Cohort, CohortArrays] = {}
        self._cohort_of: dict[Slot, Cohort] = {}
        # The last way out of each window: what its next way in, or a reader, must wait for.
        self._written: dict[CohortWindow, Event] = {}
        self._ring_bytes = 0

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """All can be kept."""

    def check_all(self, parameters: Collection[torch.Tensor]) -> None:
        """All can be kept."""

    def admit(self, cohort: Cohort) -> None:
        """Take host memory for new slots, and make their masters there, slice by slice.

        Raises:
            ConfigError: When a slot is on another device than this home was made for.
            HostMemoryError: When there is no host memory.
        """
        for slot in cohort.slots:
            if slot.device != self.transfer.device:
                raise ConfigError(
                    f"{slot.name} is on {slot.device}, and the optimizer's state goes to "
                    f"{self.transfer.device} for its windows.",
                    instead="move the model first, and call swap_optimizer then.",
                )
        arrays = CohortArrays(cohort, self._store)
        for window in cohort.windows:
            for piece in window.slices:
                slot = window.slot(piece)
                if slot.has_master:
                    master = arrays.elements(slot)[MASTER][piece.start : piece.stop]
                    # Widened on the host: the device would need memory for it.
                    master.copy_(slot.flat()[piece.start : piece.stop].cpu())
        self._arrays[cohort] = arrays
        self._cohort_of.update(dict.fromkeys(cohort.slots, cohort))

    def dismiss(self, cohort: Cohort) -> None:
        """Give host memory back, without a wait: who gets it waits for the last way out."""
        self._arrays.pop(cohort).release()
        for window in cohort.windows:
            self._written.pop(window, None)
        for slot in cohort.slots:
            del self._cohort_of[slot]

    def walk(self, windows: Sequence[CohortWindow]) -> _HostWalk:
        """Allocate the ring."""
        return _HostWalk(self, windows)

    def arrays(self, cohort: Cohort) -> CohortArrays:
        """The host memory of a cohort."""
        return self._arrays[cohort]

    def elements(self, slot: Slot) -> dict[str, torch.Tensor]:
        """See `Home.elements`."""
        self.settle()
        return self._arrays[self._cohort_of[slot]].elements(slot)

    def scalars(self, slot: Slot) -> list[dict[str, torch.Tensor]]:
        """See `Home.scalars`."""
        self.settle()
        return self._arrays[self._cohort_of[slot]].scalars(slot)

    def spread_scalars(self) -> None:
        """See `Home.spread_scalars`."""
        for arrays in self._arrays.values():
            if arrays.scalars_were_written():
                self.settle()
                arrays.spread_scalars()

    def settle(self) -> None:
        """Block the host until every way out has ended, those of interrupted steps included."""
        self.transfer.finish_sends()
        self._written.clear()

    def tidy(self) -> None:
        """All is kept."""

    def written(self, window: CohortWindow) -> tuple[Event, ...]:
        """The last way out of a window, if it may still be under way."""
        return (self._written[window],) if window in self._written else ()

    def note_written(self, window: CohortWindow, way_out: Event) -> None:
        """Note the way out of a window."""
        self._written[window] = way_out
        self._arrays[window.cohort].used_by(way_out)

    def note_ring(self, nbytes: int) -> None:
        """Note how large the ring of a step was."""
        self._ring_bytes = nbytes

    def report(self) -> Mapping[str, Any]:
        """Bytes on the host, and on the device while a step runs."""
        return {
            "device_state_bytes": 0,
            "device_state_bytes_in_step": self._ring_bytes,
            "host_state_bytes": sum(arrays.nbytes() for arrays in self._arrays.values()),
            "host_reserved_bytes": self._store.reserved_bytes(),
        }


class _HostWalk:
    def __init__(self, home: HostHome, windows: Sequence[CohortWindow]) -> None:
        self._home = home
        self._transfer = home.transfer
        self._windows = windows
        size = max(home.arrays(w.cohort).window_bytes(w) for w in windows)
        count = min(_RING, len(windows))
        self._ring = [Arena(size, home.transfer.device) for _ in range(count)]
        self._moved: dict[int, list[torch.Tensor]] = {}
        self._way_in: dict[int, Event] = {}
        self._way_out: dict[int, Event] = {}
        home.note_ring(size * count)

    def fetch(self, window: int) -> None:
        found = self._windows[window]
        arena = self._ring[window % len(self._ring)]
        arena.rewind()
        sources = list(self._home.arrays(found.cohort).moving(found))
        moved = [arena.take(source.numel(), source.dtype) for source in sources]
        after = self._home.written(found)
        if window >= _RING:
            after = (*after, self._way_out[window - _RING])
        self._moved[window] = moved
        self._way_in[window] = self._transfer.bring(
            list(zip(moved, sources, strict=True)), after=after
        )

    def enter(self, window: int) -> list[Held]:
        self._transfer.wait(self._way_in[window])
        return self._held(window, self._moved[window])

    def leave(self, window: int, held: list[Held]) -> None:
        found = self._windows[window]
        arrays = self._home.arrays(found.cohort)
        pairs = list(zip(arrays.moving(found), self._moved[window], strict=True))
        self._way_out[window] = self._transfer.send(pairs)
        self._home.note_written(found, self._way_out[window])
        for one in held:
            arrays.put_back(one.slot, one.piece, one.scalars)

    def blank(self, window: int) -> list[Held]:
        found = self._windows[window]
        arena, arrays = self._ring[-1], self._home.arrays(found.cohort)
        arena.rewind()
        moved = [arena.take(part.numel(), part.dtype) for part in arrays.moving(found)]
        return self._held(window, moved)

    def close(self) -> None:
        while self._ring:
            self._transfer.tie(self._ring[-1].memory)
            self._ring.pop()

    def _held(self, window: int, moved: list[torch.Tensor]) -> list[Held]:
        found = self._windows[window]
        arrays = self._home.arrays(found.cohort)
        return [
            Held(found.slot(piece), piece, *arrays.cut(found, piece, moved))
            for piece in found.slices
        ]
