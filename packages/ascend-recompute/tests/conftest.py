"""What the tests of replays share: one program, run plain and with `CheckpointWithoutOutput`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_core.testing import bitwise_equal
from ascend_recompute.without_output import CheckpointWithoutOutput

Maker = Callable[[], Any]
Count = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[[Maker, Count], Sequence[Tensor | None]]


class Plain:
    """Has the methods of `CheckpointWithoutOutput`, and calls the function."""

    def __init__(self, context_fn: Any = None) -> None:
        pass

    def checkpoint(self, function: Callable[..., Any], _: bool, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def discard_output(self) -> None:
        pass

    def recompute(self, grad: Tensor | None = None) -> None:
        pass

    def discard_output_and_register_recompute(self, consumer_output: Tensor) -> None:
        pass


@pytest.fixture
def same_as_plain() -> Callable[..., None]:
    """Run a program with both classes: equal values, equal random position, `runs` calls."""
    return _same_as_plain


def _same_as_plain(program: Program, *, runs: int) -> None:
    """Compare a program's results bit by bit.

    Args:
        program: Gets the class to use and a wrapper that counts the calls of a function; returns
            the tensors that must be equal.
        runs: How often the wrapped functions must be called with `CheckpointWithoutOutput` for
            each time that they are called in the plain run.
    """
    plain, plain_calls = _run(program, Plain)
    ours, calls = _run(program, CheckpointWithoutOutput)
    assert len(plain) == len(ours)
    for number, (left, right) in enumerate(zip(plain, ours, strict=True)):
        if left is None or right is None:
            assert left is right, f"value {number} is missing in one run"
        else:
            assert bitwise_equal(left, right), f"value {number} differs"
    assert plain_calls > 0
    assert calls == runs * plain_calls


def _run(program: Program, make: Maker) -> tuple[list[Tensor | None], int]:
    torch.manual_seed(0)
    calls = 0

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return counted

    values = [*program(make, count)]
    kept = [None if value is None else value.detach().clone() for value in values]
    return [*kept, torch.get_rng_state(), torch.rand(1)], calls
