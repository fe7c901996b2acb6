"""Finds memory that a training step leaves behind, with the garbage collector off."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_core.device import current_backend, device_of
from ascend_core.memory._census import reachable_tensors, storage_of
from ascend_core.memory.measure import measure_peak

__all__ = ["Growth", "alive_after", "live_storage_count"]


@dataclasses.dataclass(frozen=True)
class Growth:
    """What repeated steps left behind.

    Attributes:
        nbytes: Bytes in use after the steps, less those before them.
        storages: Storages alive after them, less those before them; Python must be able to reach
            them, so the bytes are the stricter measure.
    """

    nbytes: int
    storages: int


def live_storage_count(device: torch.device | str | None = None) -> int:
    """Count the storages with memory on a device that Python, gradients and graphs can reach.

    Args:
        device: The current accelerator when there is one, else the CPU, when left out.
    """
    place = current_backend().device() if device is None else device_of(device)
    storages = (storage_of(tensor) for tensor in reachable_tensors())
    return len({s._cdata for s in storages if s is not None and s.device == place and s.nbytes()})


def alive_after(
    step: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    gc_enabled: bool = False,
    device: torch.device | str | None = None,
) -> Growth:
    """Run a step several times and measure what is in use afterwards that was not before.

    With the collector off, a reference cycle that holds memory shows as growth.

        assert alive_after(step) == Growth(nbytes=0, storages=0)

    Args:
        step: One step; what it returns is dropped.
        steps: How often it runs while it is measured.
        warmup: How often it runs before, so that optimizer state and caches are there.
        gc_enabled: Leave the garbage collector as it is.
        device: What to measure; the current accelerator when there is one, else the CPU.

    Returns:
        The growth over the measured steps; zero when nothing leaks.
    """
    with _collector_off(stay_on=gc_enabled):
        for _ in range(warmup):
            step()
        gc.collect()
        before = live_storage_count(device)
        with measure_peak(device) as memory:
            for _ in range(steps):
                step()
        return Growth(memory.held_bytes, live_storage_count(device) - before)


@contextmanager
def _collector_off(*, stay_on: bool) -> Iterator[None]:
    was_on = gc.isenabled()
    if not stay_on:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
