"""How an accelerator's counters become a measurement.

The allocator here is a stand-in: the real one needs a device. On a machine that has one,
`test_memory_measure.py` measures it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch

from ascend_core.errors import MeasurementError
from ascend_core.memory import _allocator


class Allocator:
    """Counts as torch's caching allocators do."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self._sampled = threading.Semaphore(0)

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.current

    def memory_stats(self, device: torch.device) -> Mapping[str, int]:
        self._sampled.release()
        return {"active_bytes.all.current": self.current, "active_bytes.all.peak": self.peak}

    def wait_for_samples(self, number: int) -> None:
        """Wait until the counters were read as often from now on."""
        while self._sampled.acquire(blocking=False):
            pass  # from before
        for _ in range(number):
            assert self._sampled.acquire(timeout=60)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    stand_in = Allocator()
    monkeypatch.setattr(_allocator, "backend_of", lambda device: stand_in)
    return stand_in


@pytest.fixture
def recorder(allocator: Allocator) -> _allocator.AllocatorRecorder:
    allocator.take(1000)
    allocator.take(-400)
    recorder = _allocator.AllocatorRecorder(torch.device("meta"))
    recorder.start()
    return recorder


def test_a_peak_between_two_samples_is_not_missed(
    allocator: Allocator, recorder: _allocator.AllocatorRecorder
) -> None:
    allocator.take(5000)
    allocator.take(-4990)
    timeline = recorder.stop()
    assert recorder.baseline_bytes == 600
    assert recorder.peak_bytes == 5000
    assert timeline.events[0] == (0.0, 0)
    assert timeline.events[-1][1] == 10


def test_the_timeline_shows_what_stays_for_longer_than_a_sample(
    allocator: Allocator, recorder: _allocator.AllocatorRecorder
) -> None:
    allocator.take(300)
    allocator.wait_for_samples(2)
    allocator.take(-300)
    timeline = recorder.stop()
    assert timeline.peak == 300
    times = [moment for moment, _ in timeline.events]
    assert times == sorted(times)


def test_a_peak_counter_that_somebody_resets_is_noticed(
    allocator: Allocator, recorder: _allocator.AllocatorRecorder
) -> None:
    allocator.take(300)
    allocator.wait_for_samples(2)
    allocator.take(-300)
    allocator.reset_peak(torch.device("meta"))
    with pytest.raises(MeasurementError, match="was reset while"):
        recorder.stop()
