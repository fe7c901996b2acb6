"""Noticing that a module was given another parameter than the one that its optimizer knows.

[Note: how a replaced parameter is found]
`module.weight = nn.Parameter(...)`, and `load_state_dict(assign=True)` with it, leave an optimizer
with a parameter that nothing uses any more: it never has a gradient again, and training goes on
without it, in silence. Torch offers one place through which every such assignment goes, the hooks
for the registration of parameters. They see every module of the process; ours looks only at those
that give up a parameter of its own optimizer, and goes when the optimizer goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ascend_core.errors import ConfigError

__all__ = ["ParameterWatch"]


class _Holder(NamedTuple):
    """A place in a model that once held a parameter of the optimizer."""

    module: weakref.ref[nn.Module]
    attribute: str

    def now(self) -> torch.Tensor | None:
        """The parameter that is there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.attribute)


class ParameterWatch:
    """Follows the parameters of one optimizer through their modules."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self._left: dict[int, list[_Holder]] = {}  # by the parameter that was there
        handle = register_module_parameter_registration_hook(_noting(self))
        self._finalizer = weakref.finalize(self, handle.remove)
        self._finalizer.atexit = False

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Learn which parameters the optimizer has."""
        self._known = {id(parameter): parameter for parameter in parameters}

    def note(self, module: nn.Module, attribute: str, new: torch.Tensor | None) -> None:
        """A module is about to be given a parameter."""
        old = module._parameters.get(attribute)
        if old is None or new is None or old is new:
            return
        holder = _Holder(weakref.ref(module), attribute)
        if id(old) in self._known and holder not in self._left.get(id(old), []):
            self._left.setdefault(id(old), []).append(holder)

    def update(self, groups: list[dict[str, Any]]) -> None:
        """Put new parameters into the groups where those stand that they replaced.

        Raises:
            ConfigError: When a parameter that was shared by several modules no longer is.
        """
        if not self._left:
            return
        new = {key: _successor(self._known[key], left) for key, left in self._left.items()}
        # A module that was tied to another parameter of the optimizer has left its own behind.
        new = {key: found for key, found in new.items() if id(found) not in self._known}
        for group in groups:
            group["params"][:] = [new.get(id(old), old) for old in group["params"]]
        self._left.clear()

    def close(self) -> None:
        """Take the hook away. A second call does nothing."""
        self._finalizer()


def _successor(old: torch.Tensor, left: list[_Holder]) -> torch.Tensor:
    found = {id(now): now for holder in left if (now := holder.now()) is not None}
    if not found:
        return old
    if len(found) > 1 or (old.grad is not None and id(old) not in found):
        names = ", ".join(sorted({holder.attribute for holder in left}))
        raise ConfigError(
            f"a parameter that several modules shared ({names}) is not shared any more.",
            why="modules were given new parameters, as load_state_dict(assign=True) gives one to "
            "each name, and the optimizer has one for all of them.",
            instead="tie them again after loading, load with assign=False, or build the optimizer "
            "again.",
        )
    return next(iter(found.values()))


def _noting(watch: ParameterWatch) -> Callable[[nn.Module, str, Any], None]:
    """A hook that does not keep the watch alive."""
    watching = weakref.ref(watch)

    def note(module: nn.Module, attribute: str, parameter: Any) -> None:
        found = watching()
        if found is not None:
            found.note(module, attribute, parameter)

    return note
