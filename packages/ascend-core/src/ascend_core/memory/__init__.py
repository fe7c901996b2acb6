"""Measures memory: peaks, what is held, timelines, and who holds it."""

from __future__ import annotations

from ascend_core.memory.live import (
    BACKWARD,
    OUTSIDE,
    Kind,
    LiveStorage,
    LiveStorages,
    track_live,
)
from ascend_core.memory.measure import PeakMeasurement, measure_peak
from ascend_core.memory.timeline import MemoryTimeline, plot_timelines

__all__ = [
    "BACKWARD",
    "OUTSIDE",
    "Kind",
    "LiveStorage",
    "LiveStorages",
    "MemoryTimeline",
    "PeakMeasurement",
    "measure_peak",
    "plot_timelines",
    "track_live",
]
