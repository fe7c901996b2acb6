"""Streams and events: torch's own on an accelerator, inline ones on the CPU.

`Stream` and `Event` only name the methods of `torch.Stream` and `torch.Event` that the suite uses,
so that the CPU's inline objects and torch's own can be typed alike. Nothing here wraps torch's.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

import torch

from ascend_core.errors import ConfigError

__all__ = ["Event", "InlineEvent", "InlineStream", "Stream"]


class Event(Protocol):
    """What the suite uses of `torch.Event`."""

    def record(self, stream: Any = None) -> None:
        """Mark this point in `stream`, or in the current stream."""

    def wait(self, stream: Any = None) -> None:
        """Make `stream`, or the current stream, wait for the recorded point. The host goes on."""

    def query(self) -> bool:
        """Whether the recorded point has been reached."""

    def synchronize(self) -> None:
        """Block the host until the recorded point has been reached."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from this event to `other`; both were made with `timing=True`."""


class Stream(Protocol):
    """What the suite uses of `torch.Stream`."""

    @property
    def device(self) -> torch.device:
        """The device whose work the stream orders."""

    def wait_event(self, event: Any) -> None:
        """Make what is queued here from now on wait for `event`. The host goes on."""

    def wait_stream(self, other: Any) -> None:
        """Make what is queued here from now on wait for all that `other` holds now."""

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, and return it."""

    def query(self) -> bool:
        """Whether all work of the stream has ended."""

    def synchronize(self) -> None:
        """Block the host until all work of the stream has ended."""


class InlineEvent:
    """An event of the CPU, where everything before it has ended by the time it is recorded.

    Args:
        timing: Whether to note the time of `record`, for `elapsed_time`.
    """

    def __init__(self, *, timing: bool = False) -> None:
        self._timing = timing
        self._recorded_ns: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time, if this event keeps times."""
        if self._timing:
            self._recorded_ns = time.perf_counter_ns()

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: what came before has ended."""

    def query(self) -> bool:
        """Return true: what came before has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: what came before has ended."""

    def elapsed_time(self, other: InlineEvent) -> float:
        """Milliseconds from the last `record` of this event to that of `other`.

        Raises:
            ConfigError: When one of the two keeps no times or was not recorded.
        """
        if self._recorded_ns is None or other._recorded_ns is None:
            raise ConfigError(
                "the time between two events is not known.",
                why="an event was not recorded, or was made without timing.",
                instead="make both with new_event(timing=True) and record both.",
            )
        return (other._recorded_ns - self._recorded_ns) / 1e6


@dataclasses.dataclass(frozen=True)
class InlineStream:
    """The stream of the CPU: work runs in the calling thread, in the order of the program.

    All inline streams are equal, since they are the same queue.
    """

    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def wait_event(self, event: Event) -> None:
        """Do nothing: what came before has ended."""

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: what came before has ended."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one without timing, and return it."""
        recorded = InlineEvent() if event is None else event
        recorded.record(self)
        return recorded

    def query(self) -> bool:
        """Return true: what came before has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: what came before has ended."""
