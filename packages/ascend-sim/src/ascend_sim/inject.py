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
    """RuntimeError, at the next synchronisation or operator: the kernel fails as it runs. The
    device has stopped then, and raises again until `Simulator.take_error`."""
    LATE_COPY = 4
    """The same with a copy that fails as it runs."""
    DEVICE_SEGMENT = 5
    """torch.OutOfMemoryError: from the `nth` time on that torch_npu's allocator finds nothing in
    its cache and asks the runtime, the device has no memory left, until the block ends."""


@contextlib.contextmanager
def injected(runtime: Runtime, fault: Fault, nth: int) -> Iterator[None]:
    """Let the `nth` occurrence of `fault` within the block fail; once, but for a segment.

    Raises:
        ConfigError: When `fault` is none, `nth` is no positive number, or a block around this one
            waits for the same fault.
        FaultNotReachedError: When the block ends without an exception and without having reached
            it: the walk through a step is over.
    """
    if not isinstance(fault, Fault):
        known = ", ".join(str(known) for known in Fault)
        raise ConfigError(f"{fault!r} is no fault.", instead=f"one of {known}")
    if not isinstance(nth, int) or isinstance(nth, bool) or nth < 1:
        raise ConfigError(
            f"nth={nth!r} is no occurrence.", instead="a whole number; the first is 1"
        )
    if outer := runtime.inject(fault.value, nth):
        runtime.inject(fault.value, outer)
        raise ConfigError(
            f"{fault} is awaited already, by a block around this one.",
            why=f"it strikes the {outer}. occurrence from here, and each fault has one place",
            instead="one block for each fault; blocks of different faults may be nested",
        )
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
