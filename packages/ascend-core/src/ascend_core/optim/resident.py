"""The plain home: state stays on the device, where windows are views of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ascend_core.optim.home import MASTER, Cohort, CohortWindow, Held, Slot
from ascend_core.optim.masters import Kernel, Masters, StoredMasters
from ascend_core.optim.rules import Entry

__all__ = ["Resident", "ResidentWalk"]


class Resident:
    """Keeps state on the device of its parameter. Nothing moves; windows only bound temporaries."""

    in_place = True
    early = False
    kernel: Kernel | None = None

    def __init__(self) -> None:
        self.masters: Masters = StoredMasters(self.elements)
        self._elements: dict[Slot, dict[str, torch.Tensor]] = {}
        self._scalars: dict[Slot, list[dict[str, torch.Tensor]]] = {}

    def kept(self, slot: Slot) -> Sequence[Entry]:
        """What is kept here for each element of a slot."""
        return slot.elements

    def slots(self) -> Collection[Slot]:
        """All slots that have room here."""
        return self._elements.keys()

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """All can be kept."""

    def check_all(self, parameters: Collection[torch.Tensor]) -> None:
        """All can be kept."""

    def admit(self, cohort: Cohort) -> None:
        """Allocate and fill the state of new slots."""
        elements = {slot: _new_elements(slot, self.kept(slot)) for slot in cohort.slots}
        scalars = {s: [_new_scalars(s) for _ in range(s.slices)] for s in cohort.slots}
        self._elements.update(elements)
        self._scalars.update(scalars)

    def dismiss(self, cohort: Cohort) -> None:
        """Drop the state of a cohort."""
        for slot in cohort.slots:
            self._elements.pop(slot, None)
            self._scalars.pop(slot, None)

    def walk(self, windows: Sequence[CohortWindow]) -> ResidentWalk:
        """Nothing is allocated: a window is a view."""
        return ResidentWalk(self, windows)

    def elements(self, slot: Slot) -> dict[str, torch.Tensor]:
        """See `Home.elements`."""
        return self._elements[slot]

    def scalars(self, slot: Slot) -> list[dict[str, torch.Tensor]]:
        """See `Home.scalars`."""
        return self._scalars[slot]

    def spread_scalars(self) -> None:
        """See `Home.spread_scalars`."""
        for first, *others in filter(None, self._scalars.values()):
            for other in others:
                for name, scalar in first.items():
                    other[name].copy_(scalar)

    def settle(self) -> None:
        """Block the host until the steps have been computed: only then is it known that they were.

        Raises:
            RuntimeError: When a kernel failed.
        """
        for device in {slot.parameter.device for slot in self._elements}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.current_stream(device).synchronize()

    def tidy(self) -> None:
        """All is kept."""

    def report(self) -> Mapping[str, Any]:
        """Bytes of state on the device."""
        held = sum(t.nbytes for one in self._elements.values() for t in one.values())
        return {"device_state_bytes": held, "host_state_bytes": 0}


class ResidentWalk:
    """Windows that are views. What is held is the state itself."""

    def __init__(self, home: Resident, windows: Sequence[CohortWindow]) -> None:
        self._home = home
        self._windows = windows

    def fetch(self, window: int) -> None:
        """All is here."""

    def enter(self, window: int) -> list[Held]:
        """Views of the state."""
        found = self._windows[window]
        return [self._held(found.slot(piece), piece) for piece in found.slices]

    def leave(self, window: int, held: list[Held]) -> None:
        """The state itself was changed."""

    def blank(self, window: int) -> list[Held]:
        """Never asked for."""
        raise AssertionError("state that is stepped in place is nothing to try arithmetic on")

    def close(self) -> None:
        """Nothing was allocated."""

    def _held(self, slot: Slot, piece: Any) -> Held:
        elements = self._home.elements(slot)
        if piece.numel != slot.parameter.numel():
            elements = {name: t[piece.start : piece.stop] for name, t in elements.items()}
        scalars = self._home.scalars(slot)[piece.number]
        return Held(slot, piece, dict(elements), _placed(slot, scalars))


def _placed(slot: Slot, scalars: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The scalars where the kernels want them: the options of a group may have changed."""
    device = slot.scalar_device
    for name, scalar in scalars.items():
        if scalar.device != device:
            scalars[name] = scalar.to(device)
    return scalars


def _new_elements(slot: Slot, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    numel, device = slot.parameter.numel(), slot.parameter.device
    made = {}
    for entry in entries:
        made[entry.name] = torch.empty(numel, dtype=slot.dtype, device=device)
        if entry.name == MASTER:
            made[entry.name].copy_(slot.flat())
        else:
            made[entry.name].fill_(entry.fill or 0.0)
    return made


def _new_scalars(slot: Slot) -> dict[str, torch.Tensor]:
    device, dtype = slot.scalar_device, slot.scalar_dtype
    return {e.name: torch.full((), e.fill or 0.0, dtype=dtype, device=device) for e in slot.scalars}
