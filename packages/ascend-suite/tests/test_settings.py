from __future__ import annotations

from typing import Any

import pytest

from ascend_core.errors import ConfigError
from ascend_suite.demo.settings import DemoSettings


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": -32}, "hidden is -32"),
        ({"hidden": 100}, "hidden is 100, which cannot be split into attention heads"),
        ({"seq": 0}, "seq is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"steps": 1}, "steps is 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"memory_steps": 0}, "memory-steps is 0"),
        ({"time_rounds": 0}, "time-rounds is 0"),
        ({"timed_steps": 0}, "timed-steps is 0"),
    ],
)
def test_a_bad_value_is_refused_with_what_why_and_instead(
    changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        DemoSettings(**changes)
    assert caught.value.what.startswith(what)
    assert caught.value.why and caught.value.instead


@pytest.mark.parametrize(("hidden", "near"), [(1, 32), (100, 96), (129, 128)])
def test_a_width_that_fits_no_heads_is_answered_with_one_that_does(hidden: int, near: int) -> None:
    with pytest.raises(ConfigError, match=f"such as {near}"):
        DemoSettings(hidden=hidden)


@pytest.mark.parametrize("changes", [{"seed": 0}, {"seed": 2**63 - 1}, {"dropout": 0.0}])
def test_values_at_the_edge_are_taken(changes: dict[str, Any]) -> None:
    DemoSettings(**changes)


def test_steps_are_counted_over_all_three_parts_of_a_run() -> None:
    settings = DemoSettings(steps=10, memory_steps=3, time_rounds=4, timed_steps=2)
    assert settings.steps_per_run == 3 + 10 + 4 * (1 + 2)


@pytest.mark.parametrize("longest", ["steps", "memory_steps", "timed_steps"])
def test_there_are_batches_for_the_longest_part(longest: str) -> None:
    settings = DemoSettings(**{"steps": 4, "memory_steps": 4, "timed_steps": 3, longest: 9})
    assert settings.batches == (10 if longest == "timed_steps" else 9)
