"""What a forward reads of its module beside tensors, as it was when it was found out.

[Note: a proof holds for what was run]
An epsilon may be changed after a norm proved what it computes, an activation be replaced or given a
hook. Then the module computes itself, and the handle's `report()` says why. Only numbers, words and
functions are compared; of other attributes the type is. An attribute that is new is none that the
forward that was run has read.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["Settings", "is_watched"]

_CONSTANTS = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_BOOKKEEPING = frozenset(vars(nn.Module()))

Facts = tuple[tuple[str, Any], ...]


class Settings:
    """What a module and the parts inside it had when the module's forward was run.

    Args:
        module: The module.
        parts: What runs inside it and is no longer called, by name: activations.
    """

    def __init__(self, module: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self._own = _facts(module)
        self._parts = tuple((name, type(part), _facts(part)) for name, part in parts.items())

    def change(self, module: nn.Module) -> str | None:
        """What has become another since then; None where nothing has."""
        changed = _changed(module, self._own)
        if changed is not None:
            return f"its {changed} has changed since"
        for name, kind, facts in self._parts:
            part: Any = module
            for step in name.split("."):
                part = getattr(part, step, None)
            if type(part) is not kind or _changed(part, facts) is not None:
                return f"its {name} has changed since"
            if is_watched(part):
                return f"somebody watches the calls of its {name} since"
        return None


def is_watched(module: nn.Module) -> bool:
    """Whether hooks are on a module."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _facts(module: nn.Module) -> Facts:
    found = ((name, value) for name, value in vars(module).items() if name not in _BOOKKEEPING)
    return tuple((name, _fact(value)) for name, value in found)


def _fact(value: Any) -> Any:
    """What an attribute is compared by. Holds no module: a handle keeps no model alive."""
    return value if type(value) in _CONSTANTS or type(value) in _FUNCTIONS else type(value)


def _changed(module: nn.Module, facts: Facts) -> str | None:
    for name, fact in facts:
        now = _fact(getattr(module, name, None))
        if now is not fact and now != fact:
            return name
    return None
