"""What happened on the modelled clock, as the runtime tells it."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    """What a span is."""

    KERNEL = 0
    H2D = 1
    D2H = 2
    D2D = 3
    HOST = 4
    """A function of the host in stream order."""
    RECORD = 5
    WAIT = 6
    """A stream that waits for an event. Its span is the moment in which it goes on."""
    WAITING = 7
    """No task: the host, in a synchronisation."""
    COLLECTIVE = 8
    """Between ranks; sends and receives too. It begins when the last rank is ready."""

    @property
    def is_copy(self) -> bool:
        """Whether it moves bytes for the runtime."""
        return self in (Kind.H2D, Kind.D2H, Kind.D2D)

    @property
    def is_work(self) -> bool:
        """Whether it takes a modelled time."""
        return self.is_copy or self in (Kind.KERNEL, Kind.COLLECTIVE)


Point = tuple[int, int]
"""A stream, and how many of its tasks must have ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A task that has ended, or a wait of the host for one.

    Attributes:
        name: The operator's, or the copy's.
        kind: What it is.
        device: The number of the device.
        stream: The number of the stream; of a wait of the host, the stream that was waited for.
        ticket: Its place on the stream, from 1; of a wait of the host, the task waited for.
        after: Of a wait of a stream: what it waited for.
        bytes: Read and written, or copied.
        flops: Of matrices that are multiplied.
        submitted_ns: When the host had submitted it.
        begin_ns: When it began, on the modelled clock.
        end_ns: When it ended.
    """

    name: str
    kind: Kind
    device: int
    stream: int
    ticket: int
    after: Point | None
    bytes: int
    flops: int
    submitted_ns: int
    begin_ns: int
    end_ns: int
