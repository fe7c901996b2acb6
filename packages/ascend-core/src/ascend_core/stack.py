"""The layers of a transformer, which "the first N layers" counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from ascend_core.errors import ConfigError

__all__ = ["Named", "Stack", "check_positions", "find_stack", "first_layers", "named_stack"]

Named = dict[str, nn.Module]


class Stack(NamedTuple):
    """A container of layers.

    Attributes:
        name: Its qualified name in the model; empty for the model itself.
        layers: The layers by qualified name, in order.
    """

    name: str
    layers: Named

    def position(self, name: str) -> int | None:
        """Which layer a module is, or is in; None outside of the stack."""
        for position, layer in enumerate(self.layers):
            if name == layer or name.startswith(f"{layer}."):
                return position
        return None


def find_stack(model: nn.Module) -> Stack | None:
    """The container that holds most of the model's parameters; None when there is none.

    A container is a `ModuleList`, or a `Sequential` whose modules are all of one kind, that lies
    in no other.
    """
    found: list[Stack] = []
    for name, module in model.named_modules():
        inside = any(other.name == "" or name.startswith(f"{other.name}.") for other in found)
        if not inside and _is_container(module):
            found.append(_stack(name, module))
    return max(found, key=_parameters, default=None)


def named_stack(model: nn.Module, name: str) -> Stack:
    """The container of that name.

    Raises:
        ConfigError: When the model has no such module, or it holds no layers.
    """
    containers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0
    }
    if name not in containers:
        raise ConfigError(
            f"this {type(model).__name__} has no container of layers called {name!r}.",
            why=f"its containers are {', '.join(containers) or 'none'}.",
            instead="name one of them, as model.named_modules() does.",
        )
    return _stack(name, containers[name])


def first_layers(stack: Stack, layers: Sequence[int]) -> Named:
    """The layers at these positions.

    Raises:
        ConfigError: When there are not as many.
    """
    check_positions(layers, len(stack.layers), where=f"in {stack.name or 'the model itself'}")
    named = list(stack.layers.items())
    return dict(named[layer] for layer in sorted(set(layers)))


def check_positions(layers: Sequence[int], count: int, *, where: str) -> None:
    """Refuse positions beyond the last of `count` layers.

    Args:
        layers: The positions.
        count: How many there are.
        where: How they are counted, for the message.

    Raises:
        ConfigError: Naming those that are too large.
    """
    beyond = [layer for layer in layers if layer >= count]
    if beyond:
        raise ConfigError(
            f"layers asks for {', '.join(map(str, beyond))}, and there are {count}.",
            why=f"they are counted from 0, {where}.",
            instead=f"use positions from 0 to {count - 1}.",
        )


def _stack(name: str, module: nn.Module) -> Stack:
    prefix = f"{name}." if name else ""
    return Stack(name, {f"{prefix}{child}": layer for child, layer in module.named_children()})


def _is_container(module: nn.Module) -> bool:
    children = list(module.children())
    if not any(True for _ in module.parameters()):
        return False
    if isinstance(module, nn.ModuleList):
        return True
    kinds = {type(child).__name__ for child in children}
    return isinstance(module, nn.Sequential) and len(children) > 1 and len(kinds) == 1


def _parameters(stack: Stack) -> int:
    return sum(p.numel() for layer in stack.layers.values() for p in layer.parameters())
