"""The order in which backward asks for what forward left, learnt from what happened before.

A *pass* is one call of one layer. Two kinds of events are seen: a pass begins (forward), and a pass
is reached (backward asks for the first of its tensors). What is to be known at each event is which
passes will be reached next.

[Note: how the order is learnt]
Passes are numbered as they begin. After each event it is noted how far from its own number the pass
was that was reached next, or that none was and another began. The note is kept by what happened, by
which layer, and by how many passes were alive: in a schedule that repeats itself, such as that of
a pipeline with several micro-batches in flight, that names the place in the schedule. Where that
place was never seen, what the layer did last counts; and where that is unknown too, the pass that
began before.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BackwardOrder"]


class _Event(NamedTuple):
    """What happened last.

    Attributes:
        reached: Whether backward reached the pass; it began otherwise.
        layer: Whose pass it is.
        number: Of the pass.
        alive: How many passes were alive.
    """

    reached: bool
    layer: int
    number: int
    alive: int

    @property
    def keys(self) -> tuple[tuple[bool, int, int], tuple[bool, int]]:
        """By what it is remembered: first the place in the schedule, then the layer alone."""
        return (self.reached, self.layer, self.alive), (self.reached, self.layer)


class BackwardOrder:
    """Predicts which passes backward reaches next. Pure: it knows numbers alone."""

    def __init__(self) -> None:
        self._count = 0
        self._layers: dict[int, int] = {}  # of the passes that are alive, by number
        # How far away the pass is that is reached next; None where another one begins.
        self._next: dict[tuple[bool, int, int] | tuple[bool, int], int | None] = {}
        self._latest: _Event | None = None

    def begin(self, layer: int) -> int:
        """A pass of `layer` begins. Returns its number."""
        number = self._count
        self._count += 1
        self._layers[number] = layer
        self._happened(_Event(False, layer, number, len(self._layers)))
        return number

    def reach(self, number: int) -> None:
        """Backward reaches a pass that is alive."""
        self._happened(_Event(True, self._layers[number], number, len(self._layers)))

    def end(self, number: int) -> None:
        """Nothing of a pass is left."""
        self._layers.pop(number, None)

    def turns_around(self) -> bool:
        """Whether the pass that has just begun is expected to be the next that is reached."""
        return self._latest is not None and self._offset(self._latest) == 0

    def expected(self, count: int) -> list[int]:
        """The numbers of up to `count` living passes that are reached next, in that order."""
        event, numbers = self._latest, list[int]()
        while event is not None and len(numbers) < count:
            offset = self._offset(event)
            number = event.number + (offset or 0)
            if not offset or number not in self._layers or number in numbers:
                break
            numbers.append(number)
            event = _Event(True, self._layers[number], number, event.alive - 1)
        return numbers

    def _happened(self, event: _Event) -> None:
        if self._latest is not None:
            offset = event.number - self._latest.number if event.reached else None
            for key in self._latest.keys:
                self._next[key] = offset
        self._latest = event

    def _offset(self, event: _Event) -> int | None:
        for key in event.keys:
            if key in self._next:
                return self._next[key]
        return -1 if event.reached else None
