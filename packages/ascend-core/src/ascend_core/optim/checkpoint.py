"""The state of a windowed optimizer as the wrapped one would save it, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ascend_core.errors import ConfigError
from ascend_core.optim.home import MASTER, Home, Slot
from ascend_core.optim.roster import Groups, Place, Roster
from ascend_core.optim.rules import Entry

__all__ = ["Loading", "fill", "for_wrapped", "state_of"]


def state_of(slot: Slot, home: Home) -> dict[str, torch.Tensor]:
    """What the wrapped optimizer would show as a parameter's state: live tensors.

    Returns:
        The scalars, then what is kept for each element, in the parameter's shape and strides. An
        FP32 master comes last.
    """
    scalars = home.scalars(slot)[0]
    state = {entry.name: scalars[entry.name] for entry in slot.scalars}
    elements = home.elements(slot)
    for entry in slot.elements:
        if entry.name not in slot.unmade and entry.name != MASTER:
            state[entry.name] = slot.shaped(elements[entry.name])
    if slot.has_master:
        state[MASTER] = slot.shaped(home.masters.read(slot))
    return state


def for_wrapped(
    slot: Slot, state: Mapping[str, torch.Tensor], *, device: torch.device | None
) -> dict[str, torch.Tensor]:
    """A copy of a parameter's state, where and at the dtype at which the wrapped optimizer has it.

    Args:
        slot: Of the parameter.
        state: What is kept for it.
        device: Where all of it is to be instead; None for where that optimizer has it.
    """
    parameter = slot.parameter
    kept = {}
    for entry in slot.entries:
        if entry.name not in state or entry.name == MASTER:
            continue
        value = state[entry.name]
        if entry.is_scalar:
            kept[entry.name] = value.to(device or slot.scalar_device, copy=True)
        else:
            kept[entry.name] = value.to(device or parameter.device, parameter.dtype, copy=True)
    return kept


class Loading:
    """A checkpoint, checked against the optimizer that it is loaded into.

    Args:
        groups: Its `param_groups`, with options and one key for each parameter.
        state: Its `state`, by key.
        own: `param_groups` of the optimizer.

    Raises:
        ConfigError: When the groups do not match.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], own: Groups
    ) -> None:
        sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the checkpoint has groups of {sizes[0]} parameters, and the optimizer of "
                f"{sizes[1]}.",
                instead="build the optimizer over the same parameters as when it was saved.",
            )
        keys = {
            key: Place(g, i)
            for g, group in enumerate(groups)
            for i, key in enumerate(group["params"])
        }
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        self._state: dict[Place, Mapping[str, Any]] = {
            keys[key]: value for key, value in state.items() if key in keys and value
        }

    @property
    def places(self) -> list[Place]:
        """The parameters that the checkpoint has state for."""
        return list(self._state)

    def with_masters(self, roster: Roster) -> list[Slot]:
        """The slots that the checkpoint has an FP32 master for."""
        return [slot for place, slot in roster.items() if MASTER in self._state.get(place, ())]

    def write(self, groups: Groups, roster: Roster, home: Home) -> None:
        """Put options and state in.

        Raises:
            ConfigError: When the state does not fit. Nothing was changed then.
        """
        for place, slot in roster.items():
            self._check(slot, roster.entries_with(slot, self._options[place.group]), place)
        before = [dict(group) for group in groups]
        for group, options in zip(groups, self._options, strict=True):
            group.update(options)
        try:
            old = roster.rebuild()
        except BaseException:
            for group, options in zip(groups, before, strict=True):
                group.clear()
                group.update(options)
            raise
        for place, slot in roster.items():
            fill(slot, home, self._state.get(place))
        for cohort in old:
            home.dismiss(cohort)

    def _check(self, slot: Slot, entries: Sequence[Entry], place: Place) -> None:
        state = self._state.get(place)
        if state is None:
            return
        wanted = {entry.name for entry in entries}
        missing = wanted - set(state) - {entry.name for entry in entries if entry.fill is None}
        strange = set(state) - wanted - {MASTER}
        if missing or strange:
            raise ConfigError(
                f"the checkpoint's state of {slot.name} is that of another optimizer.",
                why=f"it holds {_listed(state)}, and {_listed(wanted)} is wanted.",
                instead="load a checkpoint of the same optimizer, with the same options.",
            )
        for entry in entries:
            if entry.is_scalar and not _is_number(state[entry.name]):
                raise ConfigError(
                    f"the checkpoint's {entry.name} of {slot.name} is no number.",
                    instead="load a checkpoint that the optimizer's state_dict() made.",
                )
        names = [entry.name for entry in entries if not entry.is_scalar]
        for name in [*names, MASTER]:
            value = state.get(name)
            if value is None:
                continue
            size = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if size != list(slot.layout.size):
                raise ConfigError(
                    f"the checkpoint's {name} of {slot.name} is {size}, and the parameter "
                    f"is {list(slot.layout.size)}.",
                    instead="build the optimizer over the same parameters as when it was saved.",
                )


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"


def fill(slot: Slot, home: Home, state: Mapping[str, Any] | None) -> None:
    """Set everything that is kept for a slot from a checkpoint, or to how it begins."""
    saved = state or {}
    slot.is_stepped = state is not None
    slot.unmade = {e.name for e in slot.elements if e.fill is None and e.name != MASTER}
    slot.unmade -= {name for name in slot.unmade if saved.get(name) is not None}
    elements = home.elements(slot)
    for entry in slot.elements:
        value = saved.get(entry.name)
        if entry.name == MASTER:
            home.masters.load(slot, value)
        elif value is not None:
            slot.shaped(elements[entry.name]).copy_(value)
        else:
            elements[entry.name].fill_(entry.fill or 0.0)
    for scalars in home.scalars(slot):
        for entry in slot.scalars:
            scalars[entry.name].fill_(float(saved.get(entry.name, entry.fill or 0.0)))
