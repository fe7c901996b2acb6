"""Races that the tracing of accesses has found."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Touch:
    """One side of a race.

    Attributes:
        task: The operator's name, or the copy's.
        stream: The number of its stream.
        ticket: Its place among the tasks of that stream, from 1.
        writes: Whether it writes.
    """

    task: str
    stream: int
    ticket: int
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.task!r} (task {self.ticket} of stream {self.stream}) {verb}"


@dataclasses.dataclass(frozen=True)
class Race:
    """Two tasks that touch the same bytes, at least one of them writing, and nothing orders them.

    Attributes:
        first: The one that was submitted first.
        second: The other.
        address: Of the first byte that both touch.
        bytes: How many that are, at least.
    """

    first: Touch
    second: Touch
    address: int
    bytes: int

    @property
    def missing_edge(self) -> str:
        """The wait that would order the two."""
        first, second = self.first, self.second
        return (
            f"before {second.task!r}, stream {second.stream} must wait for an event that stream "
            f"{first.stream} records after {first.task!r}"
        )

    def __str__(self) -> str:
        return (
            f"{self.second} {self.bytes} bytes at {self.address:#x} that {self.first}: "
            f"nothing orders the two.\n  missing  {self.missing_edge}"
        )
