"""Records the memory of a cuda or npu device, through its allocator's `active_bytes`."""

from __future__ import annotations

import gc
import threading
import time

import torch

from ascend_core.device import backend_of
from ascend_core.errors import MeasurementError
from ascend_core.memory.timeline import MemoryTimeline

__all__ = ["AllocatorRecorder"]

_CURRENT = "active_bytes.all.current"
_PEAK = "active_bytes.all.peak"
_SECONDS_BETWEEN_SAMPLES = 0.002


class AllocatorRecorder:
    """Bytes of active blocks of one device over time.

    [Note: active bytes]
    A block that was freed while a stream may still use it stays active until the allocator has
    seen that stream pass: it cannot be reused, so it is in use. `active_bytes` counts it,
    `memory_allocated` does not. The peak is the allocator's own counter and misses nothing. The
    timeline comes from a thread that reads the counter every 2 ms: that needs no history switched
    on (which would switch the user's own off), works on both kinds of device, and makes no
    stream wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.baseline_bytes = 0
        self.peak_bytes = 0
        self._device = device
        self._backend = backend_of(device)
        self._events: list[tuple[float, int]] = []
        self._started = 0.0
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_done, daemon=True)

    def start(self) -> None:
        """Collect garbage and reset the allocator's peak counter."""
        gc.collect()
        self._backend.reset_peak(self._device)
        self._started = time.perf_counter()
        self.baseline_bytes = self._read(_CURRENT)
        self._events.append((0.0, 0))
        self._sampler.start()

    def stop(self) -> MemoryTimeline:
        """Stop sampling.

        Returns:
            The samples: bytes in use above those at the start.

        Raises:
            MeasurementError: When the peak counter fell below a sample: it was reset meanwhile.
        """
        self._done.set()
        self._sampler.join()
        self._take_sample()
        timeline = MemoryTimeline(tuple(self._events))
        self.peak_bytes = self._read(_PEAK) - self.baseline_bytes
        if self.peak_bytes < timeline.peak:
            raise MeasurementError(
                f"the peak memory of {self._device} is not known.",
                why="its allocator's peak counter was reset while it was being measured.",
                instead="do not nest measurements of one device, nor call "
                "reset_peak_memory_stats() within one.",
            )
        return timeline

    def _sample_until_done(self) -> None:
        while not self._done.wait(_SECONDS_BETWEEN_SAMPLES):
            self._take_sample()

    def _take_sample(self) -> None:
        in_use = self._read(_CURRENT) - self.baseline_bytes
        self._events.append((time.perf_counter() - self._started, in_use))

    def _read(self, name: str) -> int:
        return self._backend.memory_stats(self._device).get(name, 0)
