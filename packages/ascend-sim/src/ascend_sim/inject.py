"""Faults: the n-th allocation, copy or kernel fails."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ascend_sim.errors import ConfigError, FaultNotReachedError

if TYPE_CHECKING:
    from ascend_sim._runtime import Runtime


class Fault(enum.Enum):
    """What fails, and how a program learns of it."""

    DEVICE_ALLOCATION = 0
    """torch.OutOfMemoryError, at the request."""
    PINNED_ALLOCATION = 1
    """RuntimeError, at the request."""
    COPY = 2
    """RuntimeError, at the submission of a copy between host and device."""
    KERNEL = 3
    """RuntimeError, at the next synchronisation or operator: the kernel fails as it runs."""


@contextlib.contextmanager
def injected(runtime: Runtime, fault: Fault, nth: int) -> Iterator[None]:
    """Let the `nth` occurrence of `fault` within the block fail, once.

    Raises:
        ConfigError: When `nth` is not positive.
        FaultNotReachedError: When the block ends without an exception and without having reached
            it: the walk through a step is over.
    """
    if nth < 1:
        raise ConfigError(f"nth={nth}: the first occurrence is 1.")
    runtime.inject(fault.value, nth)
    try:
        yield
    except BaseException:
        runtime.inject(fault.value, 0)
        raise
    remaining = runtime.inject(fault.value, 0)
    if remaining:
        raise FaultNotReachedError(
            f"There was no {nth}. {fault.name.lower().replace('_', ' ')}.",
            why=f"the block ended with {nth - remaining} of them",
        )
