"""Which parameters the optimizer has, and the windows that they were cut into."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ascend_core.errors import ConfigError
from ascend_core.optim.home import Cohort, CohortWindow, Home, Slot
from ascend_core.optim.rules import Entry, Rule
from ascend_core.optim.windows import GRID, cut_windows, elements_per_window

__all__ = ["Place", "Roster", "WindowSize"]

Groups = list[dict[str, Any]]


class Place(NamedTuple):
    """Where a parameter stands in `param_groups`."""

    group: int
    position: int


class WindowSize(NamedTuple):
    """How large windows are: one of the two is given.

    Attributes:
        times: Into how many windows the first parameters are cut, at most.
        nbytes: The most bytes of state in a window.
    """

    times: int | None
    nbytes: int | None

    def elements(self, slots: Sequence[Slot]) -> int:
        """The most elements of a window."""
        if self.times is not None:
            return elements_per_window([slot.parameter.numel() for slot in slots], self.times)
        assert self.nbytes is not None
        each = max(len(slot.elements) * slot.dtype.itemsize for slot in slots)
        return max(GRID, self.nbytes // max(each, 1) // GRID * GRID)


class Roster:
    """Follows `param_groups`, which anybody may change between two steps.

    [Note: by identity, then by place]
    A parameter that is known keeps its state wherever it stands now, also when it was nowhere for
    a while. One that is not known, where a known one stood in the same group that is nowhere any
    more, has taken its place: wrappers put other tensors into `param_groups`, and
    `load_state_dict(assign=True)` makes new ones. All others are newcomers.
    """

    def __init__(self, rule: Rule, home: Home, size: WindowSize, *, master_weights: bool) -> None:
        self._rule = rule
        self._home = home
        self._size = size
        self._master_weights = master_weights
        self._elements = GRID
        self._slots: dict[Place, Slot] = {}
        self._away: set[Slot] = set()  # with state, and in no group now
        self._cohorts: list[Cohort] = []
        self.is_closed = False

    @property
    def slots(self) -> list[Slot]:
        """All slots, in the order of the groups."""
        return list(self._slots.values())

    def windows(self) -> Iterator[CohortWindow]:
        """All windows, in the order in which they are walked."""
        for cohort in self._cohorts:
            yield from cohort.windows

    def follow(self, groups: Groups, also: Collection[Place] = ()) -> None:
        """Bring slots and windows up to date.

        Args:
            groups: `param_groups`.
            also: Parameters that need a slot though they have no gradient yet.

        Raises:
            ConfigError: When a parameter cannot be stepped in windows, stands there twice, or does
                not fit the place it has taken.
            HostMemoryError: When the home has no room for a newcomer; the slots are as they were.
        """
        listed = {
            Place(g, i): parameter
            for g, group in enumerate(groups)
            for i, parameter in enumerate(group["params"])
        }
        known = {id(slot.parameter): slot for slot in (*self._away, *self._slots.values())}
        _check_distinct(listed)
        self._home.check_all(listed.values())
        here = {id(parameter) for parameter in listed.values()}
        left = {
            place: slot
            for place, slot in self._slots.items()
            if id(slot.parameter) not in here
            and place.group < len(groups)
            and slot.group is groups[place.group]
        }
        slots: dict[Place, Slot] = {}
        newcomers = []
        for place, parameter in listed.items():
            group = groups[place.group]
            slot = known.get(id(parameter)) or left.get(place)
            if slot is not None:
                slot.group = group
                has_state = slot.is_stepped and slot.entries
                if not (has_state or (slot.still_is(parameter) and self._fits(slot))):
                    slot = None  # nothing is lost: it has no state yet
            if slot is None:
                if parameter.requires_grad:
                    self._home.check(parameter, _name(group, place))
                if not self._wants(parameter) and place not in also:
                    continue
                slot = self._new_slot(parameter, group, _name(group, place))
                newcomers.append(slot)
            elif slot.parameter is not parameter:
                slot.replace(parameter)
            self._check_entries(slot)
            slots[place] = slot
        _check_one_device(slots.values())
        present = set(slots.values())
        away = {s for s in (*self._away, *self._slots.values()) if s.is_stepped} - present
        self._dismiss_all_but(present | away)
        if newcomers:
            self._cohorts.append(self._admitted(newcomers))
        self._slots, self._away = slots, away

    def rebuild(self) -> Sequence[Cohort]:
        """Make room anew where options that were loaded changed what is kept.

        Returns:
            The cohorts that are no longer in use, still to be dismissed.
        """
        if all(self._fits(slot) for slot in self._slots.values()):
            return ()
        old = self._cohorts
        slots = {
            place: self._new_slot(slot.parameter, slot.group, slot.name)
            for place, slot in self._slots.items()
        }
        self._cohorts = [self._admitted(list(slots.values()))]
        self._slots, self._away = slots, set()
        return old

    def entries_with(self, slot: Slot, options: Mapping[str, Any]) -> tuple[Entry, ...]:
        """What the wrapped optimizer would keep for a slot with these options instead."""
        return self._rule({**slot.group, **options})

    def items(self) -> list[tuple[Place, Slot]]:
        """All slots with where they stand."""
        return list(self._slots.items())

    def close(self) -> None:
        """Give all room back."""
        for cohort in self._cohorts:
            self._home.dismiss(cohort)
        self._cohorts, self._slots, self._away, self.is_closed = [], {}, set(), True

    def _dismiss_all_but(self, slots: Collection[Slot]) -> None:
        """Give back the room of cohorts that are gone from the groups altogether."""
        kept = set(slots)
        gone = [cohort for cohort in self._cohorts if kept.isdisjoint(cohort.slots)]
        for cohort in gone:
            self._cohorts.remove(cohort)
            self._home.dismiss(cohort)

    def _wants(self, parameter: torch.Tensor) -> bool:
        has_gradient = parameter.grad is not None
        return has_gradient or (self._home.early and parameter.requires_grad)

    def _new_slot(self, parameter: torch.Tensor, group: dict[str, Any], name: str) -> Slot:
        master = self._master_weights and parameter.dtype in (torch.bfloat16, torch.float16)
        return Slot(parameter, group, name, self._rule(group), master=master)

    def _admitted(self, slots: list[Slot]) -> Cohort:
        # Never smaller than before: what comes late may be most of the model.
        self._elements = max(self._elements, self._size.elements(slots))
        cohort = Cohort(slots, cut_windows([s.parameter.numel() for s in slots], self._elements))
        self._home.admit(cohort)
        return cohort

    def _fits(self, slot: Slot) -> bool:
        """Whether what is kept for a slot, and where, is what its group's options ask for."""
        kept = [entry.name for entry in slot.entries[slot.has_master :]]
        is_there = self._home.in_place or slot.moves_scalars == slot.scalars_on_device
        return is_there and kept == [entry.name for entry in self._rule(slot.group)]

    def _check_entries(self, slot: Slot) -> None:
        if not self._fits(slot):
            kept = ", ".join(entry.name for entry in slot.entries) or "nothing"
            raise ConfigError(
                f"an option of the group of {slot.name} was changed after its state was made.",
                why=f"the state is {kept}; with the new options the optimizer keeps something "
                "else, or elsewhere.",
                instead="build the optimizer again with the options that you want.",
            )


def _name(group: dict[str, Any], place: Place) -> str:
    names = group.get("param_names")
    return names[place.position] if names else f"parameter {place.position} of group {place.group}"


def _check_distinct(listed: dict[Place, torch.Tensor]) -> None:
    seen: dict[int, Place] = {}
    for place, parameter in listed.items():
        first = seen.setdefault(id(parameter), place)
        if first != place:
            raise ConfigError(
                f"one parameter stands at {tuple(first)} and at {tuple(place)} of param_groups.",
                why="it would be stepped twice.",
                instead="list each parameter once, as model.parameters() does.",
            )


def _check_one_device(slots: Collection[Slot]) -> None:
    devices = sorted({str(slot.parameter.device) for slot in slots})
    if len(devices) > 1:
        raise ConfigError(
            f"the parameters are on {', '.join(devices)}.",
            why="a window is brought to one device.",
            instead="make one optimizer for each device.",
        )
