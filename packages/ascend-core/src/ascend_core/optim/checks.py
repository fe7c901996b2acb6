"""Whether what a windowed optimizer is given has the form that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from ascend_core.errors import ConfigError

__all__ = ["check_form", "check_groups", "check_optimizer", "check_options"]

# Options that torch itself fills in where an older checkpoint lacks them.
_LATER = {
    "amsgrad",
    "capturable",
    "centered",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "momentum",
    "nesterov",
}


def check_optimizer(verb: str, optimizer: object) -> None:
    """Refuse what is no optimizer.

    Raises:
        ConfigError: Naming the verb that was given it.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"{verb} was given a {type(optimizer).__name__}.",
            why="it works on optimizers.",
            instead="build the optimizer first, and pass it.",
        )


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that cannot be stepped in windows, whatever their parameters.

    Raises:
        ConfigError: When one is differentiable, or tensors made now could not be written later.
    """
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            "a differentiable optimizer cannot be stepped in windows.",
            why="autograd would hold every window until the outer backward.",
            instead="use differentiable=False.",
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "a windowed optimizer was used in inference mode.",
            why="tensors that are made there cannot be written outside it.",
            instead="use torch.no_grad(), or leave inference mode first.",
        )


def check_form(state_dict: object) -> None:
    """Refuse what is not of the form of an optimizer's `state_dict()`.

    Raises:
        ConfigError: When it is not.
    """
    if not isinstance(state_dict, Mapping):
        raise _malformed(f"it is a {type(state_dict).__name__}.")
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not isinstance(state_dict.get(key), kind):
            raise _malformed(f"its {key!r} is {_named(state_dict, key)}.")
    for group in state_dict["param_groups"]:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise _malformed("one of its groups has no list of params.")
    if not all(isinstance(kept, Mapping) for kept in state_dict["state"].values()):
        raise _malformed("the state of a parameter is no dictionary.")


def check_options(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Refuse the options of another kind of optimizer.

    Raises:
        ConfigError: When an option is missing that no version of torch did without.
    """
    missing = sorted({name for g in groups for name in defaults.keys() - g.keys()} - _LATER)
    if missing:
        raise ConfigError(
            f"the checkpoint's groups lack {', '.join(missing)}.",
            why="they are those of another kind of optimizer.",
            instead="load a checkpoint of the same optimizer.",
        )


def _malformed(why: str) -> ConfigError:
    return ConfigError(
        "what is to be loaded is no optimizer's state_dict.",
        why=why,
        instead="give what state_dict() returned: a dictionary of 'state' and 'param_groups'.",
    )


def _named(state_dict: Mapping[str, Any], key: str) -> str:
    return f"a {type(state_dict[key]).__name__}" if key in state_dict else "missing"
