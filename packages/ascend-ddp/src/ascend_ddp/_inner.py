"""The optimizer that steps the parts: of the class, groups and options of the one given."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import ConfigError, FeatureError
from ascend_core.optim import WindowedOptimizer
from ascend_core.optim.rules import rule_for

__all__ = ["check_inner", "guarded", "options_of", "over_parts", "own_attributes"]

_OF_THE_MODEL = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says beside its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_THE_MODEL}


def own_attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """What a subclass gave its instance, and its step may read."""
    plain = vars(optim.SGD([torch.empty(0, device="cpu")]))
    torchs = {*plain, "step", "_opt_called", "grad_scale", "found_inf"}
    return {name: value for name, value in vars(optimizer).items() if name not in torchs}


def check_inner(optimizer: object) -> None:
    """Refuse what cannot be stepped piece by piece.

    Raises:
        ConfigError: When it is no optimizer, a wrapped one, or not elementwise.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"shard_optimizer was given a {type(optimizer).__name__}.",
            why="it works on optimizers.",
            instead="build the optimizer first, over the model's parameters, and pass it.",
        )
    if isinstance(optimizer, WindowedOptimizer):
        raise ConfigError(
            "the optimizer that is to be sharded is a windowed one already.",
            why="it keeps state of whole parameters, and each rank is to keep its part alone.",
            instead="pass the plain optimizer, and wrap what steps the parts: "
            "shard_optimizer(optimizer, reduction, wrap=swap_optimizer).",
        )
    try:
        rule_for(optimizer)
    except ConfigError as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be sharded.", why=error.why, instead=error.instead
        ) from None


def over_parts(optimizer: optim.Optimizer, parts: Mapping[int, nn.Parameter]) -> optim.Optimizer:
    """An optimizer of the same class, groups and options over the parts of the parameters.

    Args:
        optimizer: The one that was given.
        parts: By the id of a parameter. One that this rank has no part of is left out, so that a
            group may be empty.
    """
    inner: optim.Optimizer = object.__new__(type(optimizer))
    groups = [
        {**options_of(group), "params": [parts[id(p)] for p in group["params"] if id(p) in parts]}
        for group in optimizer.param_groups
    ]
    optim.Optimizer.__setstate__(
        inner,
        {
            **own_attributes(optimizer),
            "defaults": dict(optimizer.defaults),
            "param_groups": groups,
            "state": defaultdict(dict),
        },
    )
    return inner


class _Refusal:
    """A hook that refuses to use the optimizer that was sharded by itself."""

    def __init__(self, optimizer: optim.Optimizer, call: str) -> None:
        self._given = weakref.ref(optimizer)
        self._call = call

    def __call__(self, called: optim.Optimizer, *_: Any) -> None:
        if called is self._given():
            raise FeatureError(
                f"this {type(called).__name__} was sharded, and its own {self._call}() was called.",
                why="its state is spread over the ranks by what shard_optimizer returned.",
                instead=f"call {self._call}() of that one.",
            )


def guarded(optimizer: optim.Optimizer) -> list[RemovableHandle]:
    """Refuse what would need the state that has moved."""
    return [
        optimizer.register_step_pre_hook(_Refusal(optimizer, "step")),
        optimizer.register_state_dict_pre_hook(_Refusal(optimizer, "state_dict")),
        optimizer.register_load_state_dict_pre_hook(_Refusal(optimizer, "load_state_dict")),
    ]
