"""Which of the candidate modules a verb works on, counted in layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.modules import named
from ascend_core.scope import owners
from ascend_core.stack import Named, Stack, check_positions, find_stack
from ascend_recompute._options import check_model, check_policy
from ascend_recompute._values import ValueRecompute
from ascend_recompute.config import RebuildConfig
from ascend_recompute.layers import LayersRecompute
from ascend_recompute.policy import Policy


def rebuild(
    verb: Callable[..., Any],
    model: nn.Module,
    config: RebuildConfig,
    find: Callable[[nn.Module], Named],
    default: Policy,
) -> ValueRecompute:
    """Turn on a verb that rebuilds values.

    Args:
        verb: Named in errors.
        model: What it was given.
        config: Its options.
        find: Finds the modules that it works on when none are named.
        default: Its policy when none is given.

    Raises:
        ConfigError: When the model or the policy is none, or `select` finds nothing to work on.
    """
    check_model(verb, model)
    check_policy(config.policy)
    found = find(model) if config.modules is None else named(model, config.modules)
    chosen = select(model, found, config)
    return ValueRecompute(model, chosen, config.policy or default, verify=config.verify)


def select(model: nn.Module, candidates: Named, config: RebuildConfig) -> Named:
    """The candidates that `config` asks for, less those in layers that are replayed as a whole.

    [Note: what a layer is]
    "Layers" are those of the model's stack: the container that holds most of its parameters. A
    candidate belongs to the layer that it is in. In a model without a stack, or whose candidates
    all lie outside of it, each candidate is a layer of its own.

    Raises:
        ConfigError: When `layers` or `num_layers` asks for more than there is, or nothing is left.
    """
    whole = _fully_recomputed(model)
    where, count = _layers_of(model, candidates)
    free = [layer for layer in range(count) if layer not in _positions(where, whole)]
    if config.layers is not None:
        chosen = _checked(config.layers, count, free)
    elif config.num_layers is not None:
        chosen = _first(config.num_layers, count, free)
    else:
        return _not_empty({n: m for n, m in candidates.items() if not _is_inside(n, whole)})
    found = {name: module for name, module in candidates.items() if where[name] in chosen}
    if chosen and not found:
        raise ConfigError(
            f"none of the modules is in layer {', '.join(map(str, sorted(chosen)))}.",
            why=f"the first of them is {next(iter(candidates))}.",
            instead="choose other layers, or name other modules.",
        )
    return found


def _layers_of(model: nn.Module, candidates: Named) -> tuple[dict[str, int | None], int]:
    """The layer that each candidate is in, and how many layers there are."""
    stack = find_stack(model)
    where = {name: _position(stack, name) for name in candidates}
    if stack is None or all(position is None for position in where.values()):
        return {name: position for position, name in enumerate(candidates)}, len(candidates)
    return where, len(stack.layers)


def _position(stack: Stack | None, name: str) -> int | None:
    return None if stack is None else stack.position(name)


def _positions(where: dict[str, int | None], whole: set[str]) -> set[int | None]:
    return {position for name, position in where.items() if _is_inside(name, whole)}


def _fully_recomputed(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if any(isinstance(owner, LayersRecompute) for owner in owners(module))
    }


def _is_inside(name: str, whole: set[str]) -> bool:
    return any(outer in ("", name) or name.startswith(f"{outer}.") for outer in whole)


def _checked(layers: Sequence[int], count: int, free: list[int]) -> set[int]:
    check_positions(layers, count, where="in the order of the model")
    taken = sorted(set(layers) - set(free))
    if taken:
        raise ConfigError(
            f"layers asks for {', '.join(map(str, taken))}, which recompute_layers replays whole.",
            why="a layer is never both: nothing of it is held, so there is nothing to win.",
            instead=f"leave them out; {', '.join(map(str, free)) or 'none'} are free.",
        )
    return set(layers)


def _first(wanted: int, count: int, free: list[int]) -> set[int]:
    if wanted > len(free):
        raise ConfigError(
            f"num_layers is {wanted}, and {len(free)} of the {count} layers are left.",
            why="layers that recompute_layers replays whole are counted first.",
            instead=f"use a number from 1 to {len(free)}, or leave it out to take what is left."
            if free
            else "recompute fewer layers whole.",
        )
    if wanted < len(free) and len(free) < count:
        warnings.warn(
            f"{count - len(free)} fully recomputed layers and {wanted} more are not the {count} "
            "layers of this model (or pipeline stage): the rest keep all that they save.",
            stacklevel=5,
        )
    return set(free[:wanted])


def _not_empty(found: Named) -> Named:
    if not found:
        raise ConfigError(
            "nothing is left to rebuild.",
            why="recompute_layers replays every layer of this model whole.",
            instead="recompute fewer layers whole, or leave this feature off.",
        )
    return found
