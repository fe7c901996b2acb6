"""Measures the memory that a block of code uses at its worst moment, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ascend_core.device import current_backend, device_of
from ascend_core.errors import MeasurementError
from ascend_core.memory._allocator import AllocatorRecorder
from ascend_core.memory._profiler import CpuRecorder
from ascend_core.memory.timeline import MemoryTimeline

__all__ = ["PeakMeasurement", "measure_peak"]


class PeakMeasurement:
    """What `measure_peak` found; filled when its block ends, also when it ends by an exception.

    Attributes:
        device: The device that was measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._baseline_bytes: int | None = None
        self._peak_bytes = 0
        self._timeline: MemoryTimeline | None = None

    @property
    def baseline_bytes(self) -> int:
        """Bytes in use when the block began.

        On CPU the bytes of the tensors that Python, gradients and autograd graphs could reach; on
        other devices the allocator's own count.
        """
        self._finished()
        assert self._baseline_bytes is not None
        return self._baseline_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest bytes in use during the block, less `baseline_bytes`; never below 0."""
        self._finished()
        return self._peak_bytes

    @property
    def absolute_peak_bytes(self) -> int:
        """The highest bytes in use during the block, those from before included."""
        return self.baseline_bytes + self.peak_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes in use when the block ended, less `baseline_bytes`; negative when it freed more."""
        return self.timeline.events[-1][1]

    @property
    def timeline(self) -> MemoryTimeline:
        """Bytes in use less `baseline_bytes`, over the block.

        On CPU after each allocation and free; on other devices at samples some milliseconds
        apart, so that its own peak may lie below `peak_bytes`.
        """
        return self._finished()

    def _finished(self) -> MemoryTimeline:
        if self._timeline is None:
            raise MeasurementError(
                "this measurement has no result yet.",
                why="it is filled when the `with measure_peak()` block ends.",
                instead="read it after the block.",
            )
        return self._timeline

    def _fill(self, baseline_bytes: int, peak_bytes: int, timeline: MemoryTimeline) -> None:
        self._baseline_bytes = baseline_bytes
        self._peak_bytes = max(0, peak_bytes)
        self._timeline = timeline


@contextmanager
def measure_peak(device: torch.device | str | None = None) -> Iterator[PeakMeasurement]:
    """Measure the memory of one device while a block runs.

    On CPU: PyTorch's profiler, memory events only (see the notes in `memory/_profiler.py` for
    its cost and its limits); garbage is collected first; one measurement at a time. On cuda and
    npu: the allocator's `active_bytes`, which counts blocks that still wait for a stream. Resets
    the allocator's peak counters; makes no stream wait.

        with measure_peak() as memory:
            train()
        print(memory.peak_bytes, memory.held_bytes)

    Args:
        device: What to measure; the current accelerator when there is one, else the CPU.

    Yields:
        The measurement, filled at the end of the block.

    Raises:
        MeasurementError: When a measurement or a profiler already runs on this thread, or when
            somebody resets the allocator's peak counter within the block.
    """
    chosen = current_backend().device() if device is None else device_of(device)
    recorder = CpuRecorder() if chosen.type == "cpu" else AllocatorRecorder(chosen)
    measurement = PeakMeasurement(chosen)
    recorder.start()
    try:
        yield measurement
    finally:
        timeline = recorder.stop()
        measurement._fill(recorder.baseline_bytes, recorder.peak_bytes, timeline)
