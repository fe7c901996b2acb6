"""The exception tree and what its messages look like."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from ascend_core import errors
from ascend_core.errors import AscendError, ConfigError, DeviceUnavailableError, ReplayError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in inspect.getdoc(errors).splitlines():
        match = re.match(r"^(\s{4}[│\s]*(?:[├└]── )?)([A-Z]\w+Error)\b", line)
        if match:
            depth = (len(match[1]) - 4) // 4
            parents[depth:] = [match[2]]
            drawn[match[2]] = parents[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__mro__[1].__name__ for kind in CLASSES}


def test_all_is_the_whole_tree() -> None:
    assert errors.__all__ == sorted(kind.__name__ for kind in CLASSES)


def test_a_message_says_what_why_and_what_instead() -> None:
    error = ConfigError("layers is -1.", why="layers are counted.", instead="use 0 or more.")
    assert str(error) == (
        "layers is -1.\n  why      layers are counted.\n  instead  use 0 or more."
    )
    assert str(AscendError("it broke.")) == "it broke."


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_a_pickle(kind: type[AscendError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", why="why", instead="instead")))
    assert type(error) is kind
    assert (error.what, error.why, error.instead) == ("what", "why", "instead")


def test_errors_are_also_the_builtin_kind_that_callers_expect() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DeviceUnavailableError, RuntimeError)
    assert issubclass(ReplayError, RuntimeError)
