"""What the tests share: where they run, and one program that runs plain and with a replay.

[Note: the device of a test]
A test runs once on every device that this machine has (`npu:0` under `--npu-sim`). That device is
torch's default one while it runs, so that tensors and modules are made there; where a test has to
name it, it says `torch.get_default_device()`. The package itself names a device in each of its
calls, so the default hides nothing. What makes no tensor, or runs in a process of its own, is
marked `host` and runs once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_core.testing import available_devices, bitwise_equal
from ascend_recompute.without_output import CheckpointWithoutOutput

Maker = Callable[[], Any]
Count = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[[Maker, Count], Sequence[Tensor | None]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host: no device takes part; run once")
    config.addinivalue_line("markers", "without_npu: torch_npu lacks what the test is about")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    away = [item for item in items if _lacks_its_subject(item)]
    config.hook.pytest_deselected(items=away)
    items[:] = [item for item in items if item not in away]


def _lacks_its_subject(item: pytest.Item) -> bool:
    """Whether the test is about sparse tensors or memory formats, and is to run on an NPU."""
    if item.get_closest_marker("without_npu") is None or not isinstance(item, pytest.Function):
        return False
    place: torch.device = item.callspec.params["device"]
    return place.type == "npu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("host") is None:
        metafunc.parametrize("device", available_devices(), ids=str, indirect=True)


def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight: many tests collect and count."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the test, torch's default one while it runs."""
    place: torch.device = getattr(request, "param", torch.device("cpu"))
    with contextlib.nullcontext() if place.type == "cpu" else place:
        yield place


@pytest.fixture
def taken(device: torch.device) -> Callable[[int], int]:
    """How many bytes of the device a tensor takes: torch_npu adds 32, and rounds up to 512."""
    if device.type == "npu":
        return lambda nbytes: -(-(nbytes + 32) // 512) * 512
    return lambda nbytes: nbytes


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
