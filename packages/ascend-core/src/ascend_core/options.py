"""Checks of the options in a config. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_core.errors import ConfigError

__all__ = ["check_count", "check_one_of"]


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number above 0.

    Raises:
        ConfigError: Naming the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}.", instead="use a whole number above 0.")


def check_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Refuse what is not among the known words.

    Raises:
        ConfigError: Naming the option and the words.
    """
    if value not in known:
        raise ConfigError(
            f"{name} is {value!r}.", instead=f"use one of {', '.join(map(repr, known))}."
        )
