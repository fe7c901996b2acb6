"""The bytes in use over time: to look at, to keep, to compare."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_core.errors import ConfigError

__all__ = ["MemoryTimeline", "plot_timelines"]

_FORMAT = "ascend-memory-timeline"


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """Bytes in use above those at the start of the measurement, as a step function of time.

    Attributes:
        events: `(seconds since the start, bytes)`, times in order; the bytes hold until the next
            event. Bytes are negative while less is in use than at the start.
    """

    events: tuple[tuple[float, int], ...]

    @property
    def peak(self) -> int:
        """The highest number of bytes; 0 when there are no events."""
        return max((size for _, size in self.events), default=0)

    @property
    def seconds(self) -> float:
        """How long the timeline is."""
        return self.events[-1][0] - self.events[0][0] if self.events else 0.0

    def downsampled(self, limit: int = 2000) -> MemoryTimeline:
        """A timeline of at most `limit` events that keeps the peak and every local extreme it can.

        The events are cut into runs of equal count; of each run the lowest and the highest stay,
        and the first and last event of all.

        Raises:
            ConfigError: When `limit` is below 4.
        """
        if limit < 4:
            raise ConfigError(
                f"a timeline cannot be cut down to {limit} events.",
                why="its first, last, highest and lowest event always stay.",
                instead="ask for 4 events or more.",
            )
        if len(self.events) <= limit:
            return self
        inner = range(1, len(self.events) - 1)
        runs = (limit - 2) // 2
        keep = {0, len(self.events) - 1}
        for run in range(runs):
            part = inner[run * len(inner) // runs : (run + 1) * len(inner) // runs]
            keep.add(min(part, key=self._size_at))
            keep.add(max(part, key=self._size_at))
        return MemoryTimeline(tuple(self.events[index] for index in sorted(keep)))

    def to_json(self, path: str | Path) -> None:
        """Write every event to a JSON file."""
        times = [seconds for seconds, _ in self.events]
        sizes = [size for _, size in self.events]
        document = {"format": _FORMAT, "version": 1, "seconds": times, "bytes": sizes}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    @classmethod
    def from_json(cls, path: str | Path) -> MemoryTimeline:
        """Read a timeline that `to_json` wrote.

        Raises:
            ConfigError: When the file holds something else.
        """
        try:
            document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != _FORMAT or document["version"] != 1:
                raise ValueError(f"its format is {document['format']!r}")
            pairs = zip(document["seconds"], document["bytes"], strict=True)
            return cls(tuple((float(seconds), int(size)) for seconds, size in pairs))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no memory timeline.",
                why=f"{type(error).__name__}: {error}",
                instead="read a file that MemoryTimeline.to_json wrote.",
            ) from error

    def to_png(self, path: str | Path, *, title: str = "memory in use") -> None:
        """Draw the timeline. Needs matplotlib.

        Raises:
            UnavailableError: When matplotlib is not installed.
        """
        plot_timelines({title: self}, path)

    def _size_at(self, index: int) -> int:
        return self.events[index][1]


def plot_timelines(timelines: Mapping[str, MemoryTimeline], path: str | Path) -> None:
    """Draw timelines one under the other, all on one scale of bytes and one of time.

    Args:
        timelines: By the name that is written over each.
        path: The PNG file to write.

    Raises:
        ConfigError: When there is nothing to draw.
        UnavailableError: When matplotlib is not installed.
    """
    if not any(timeline.events for timeline in timelines.values()):
        raise ConfigError(
            "there is no timeline to draw.",
            instead="measure something first, e.g. with measure_peak().",
        )
    from ascend_core.memory._plot import draw

    draw(timelines, Path(path))
