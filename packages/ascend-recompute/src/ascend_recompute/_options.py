"""What every verb checks of its arguments before it touches the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ascend_core.errors import ConfigError
from ascend_recompute.policy import Policy

__all__ = ["check_model", "check_policy", "merged"]

Config = TypeVar("Config")
Verb = Callable[..., Any]


def merged(verb: Verb, kind: type[Config], config: object | None, **options: Any) -> Config:
    """The options of a verb, which were given as a config or as keywords.

    Args:
        verb: Whose options they are.
        kind: The class of its config.
        config: The config that the verb was given.
        **options: Its keywords, with None or False for those that were left out.

    Raises:
        ConfigError: When they were given as both, or `config` is of another class.
    """
    given = {n: value for n, value in options.items() if value is not None and value is not False}
    if config is None:
        return kind(**given)
    if given:
        raise ConfigError(
            f"{verb.__name__} was given a config and single options as well.",
            instead="put everything into the config, or everything into keywords.",
        )
    if not isinstance(config, kind):
        raise ConfigError(
            f"{verb.__name__} was given a {type(config).__name__} as its config.",
            instead=f"pass {kind.__name__}(...), or its fields as keywords.",
        )
    return config


def check_model(verb: Verb, model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{verb.__name__} was given a {type(model).__name__} as its model.",
            why="it works on modules.",
            instead="pass the model itself, a torch.nn.Module.",
        )


def check_policy(policy: object) -> None:
    """Refuse what is no policy."""
    if not isinstance(policy, (Policy, type(None))):
        raise ConfigError(
            f"policy is a {type(policy).__name__}.",
            why="it says which operators may be run again.",
            instead="build a Policy from the groups in ascend_recompute.policy.",
        )
