"""Draws memory timelines. The one file of core that imports matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ascend_core.errors import UnavailableError
from ascend_core.memory.timeline import MemoryTimeline

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise UnavailableError(
        "a memory timeline cannot be drawn: matplotlib is not installed.",
        why="drawing is an extra of ascend-core; measuring and JSON work without it.",
        instead='install "ascend-core[plot]", or keep the timeline with to_json().',
    ) from error

__all__ = ["draw"]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def draw(timelines: Mapping[str, MemoryTimeline], path: Path) -> None:
    """Write a PNG with one panel per timeline, all on one scale of bytes and one of time.

    Each panel shows its own peak, and as a thin line the highest peak of all.
    """
    highest = max(timeline.peak for timeline in timelines.values())
    lowest = min(size for timeline in timelines.values() for _, size in timeline.events)
    longest = max(timeline.seconds for timeline in timelines.values())
    unit, factor = next((u for u in _UNITS if highest >= u[1]), ("bytes", 1))
    figure = Figure(figsize=(9, 1.3 + 1.7 * len(timelines)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        shown = timeline.downsampled()
        seconds = [moment for moment, _ in shown.events]
        sizes = [size / factor for _, size in shown.events]
        axes.fill_between(seconds, sizes, step="post", color="#4c78a8", alpha=0.85, linewidth=0)
        axes.axhline(highest / factor, color="#999999", linewidth=0.8, linestyle=":")
        axes.axhline(timeline.peak / factor, color="#e45756", linewidth=1.0)
        axes.set_title(f"{name}: peak {timeline.peak / factor:.1f} {unit}", loc="left", fontsize=10)
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(0, longest or 1)
    panels[-1].set_ylim(min(0, lowest / factor), highest / factor * 1.1 or 1)
    figure.savefig(path, format="png")
