"""The order in which backward asks for what forward left, learnt from what happened before.

A *pass* is one call of one layer. Two kinds of events are seen: a pass begins (forward), and a pass
is reached (backward asks for the first of its tensors). What is to be known at each event is which
passes will be reached next.

[Note: how the order is learnt]
Passes are numbered as they begin. A *round* begins with a pass while no other is alive: a step, or
with gradient accumulation a micro-batch. As long as the events of a round are those of the round
before, the same ones are expected to follow.

Where they are not, or where a pass that stays alive keeps rounds from ending, notes have to do.
After each event it is noted how far from its own number the pass was that was reached next, or that
none was and another began. The note is kept by what the latest events were: in a schedule that
repeats itself, such as that of a pipeline with several micro-batches in flight and several chunks
of the model, they nearly always name the place in the schedule. Where these were never seen in a
row, it counts what happened when the layer did the same and as many passes were alive; then what
the layer did last; and where that is unknown too, the pass that began before.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["BackwardOrder"]


_DEPTH = 16  # events that name a place in the schedule
_MANY = 1 << 16  # notes that are kept
_LONGEST = 1 << 16  # events of a round that are kept


class _Event(NamedTuple):
    """What happened.

    Attributes:
        reached: Whether backward reached the pass; it began otherwise.
        number: Of the pass.
        alive: How many passes were alive.
        history: Of this event and those before it: the kind, the layer, and how far away the pass
            was from that of the event before.
        keys: By what it is remembered: what says most first.
    """

    reached: bool
    number: int
    alive: int
    history: tuple[tuple[bool, int, int], ...]
    keys: tuple[int | tuple[bool, int, int] | tuple[bool, int], ...]


class _Round:
    """The events of a round: whether a pass was reached, its layer, and its number from the first.

    Args:
        first: The number of its first pass.
        before: The events of the round before.
    """

    def __init__(self, first: int, before: list[tuple[bool, int, int]]) -> None:
        self.first = first
        self.events: list[tuple[bool, int, int]] = []
        self._before = before
        self._repeats = bool(before)

    def add(self, reached: bool, layer: int, number: int) -> None:
        """Something has happened."""
        event, place = (reached, layer, number - self.first), len(self.events)
        same = place < len(self._before) and self._before[place] == event
        self._repeats = self._repeats and same
        if place < _LONGEST:
            self.events.append(event)

    def next(self, count: int) -> list[int] | None:
        """The numbers of up to `count` passes that are reached before another begins.

        None where that is not known.
        """
        if not self._repeats:
            return None
        place = len(self.events)
        ahead = self._before[place : place + count]
        reached = itertools.takewhile(lambda event: event[0], ahead)
        return [self.first + number for _, _, number in reached]

    def following(self, first: int) -> _Round:
        """The round that begins when this one has ended."""
        has_backward = any(reached for reached, _, _ in self.events)
        return _Round(first, self.events if has_backward else self._before)


class BackwardOrder:
    """Predicts which passes backward reaches next. Pure: it knows numbers alone."""

    def __init__(self) -> None:
        self._count = 0
        self._layers: dict[int, int] = {}  # of the passes that are alive, by number
        # How far away the pass is that is reached next; None where another one begins. The note
        # that was made last is last.
        self._next: OrderedDict[object, int | None] = OrderedDict()
        self._latest: _Event | None = None
        self._round = _Round(0, [])

    def begin(self, layer: int) -> int:
        """A pass of `layer` begins. Returns its number."""
        number = self._count
        self._count += 1
        if not self._layers:
            self._round = self._round.following(number)
        self._layers[number] = layer
        self._happened(self._event(False, layer, number, len(self._layers)))
        return number

    def reach(self, number: int) -> None:
        """Backward reaches a pass that is alive."""
        self._happened(self._event(True, self._layers[number], number, len(self._layers)))

    def end(self, number: int) -> None:
        """Nothing of a pass is left."""
        self._layers.pop(number, None)

    def turns_around(self) -> bool:
        """Whether the pass that has just begun is expected to be the next that is reached.

        That its layer once turned around, at whatever place, is too little to say so: who believes
        it keeps what a whole step saves, where each layer had a backward of its own before.
        """
        latest, known = self._latest, self._round.next(1)
        if latest is None or known is None:
            return latest is not None and self._offset(latest, latest.keys[:-1]) == 0
        return known == [latest.number]

    def expected(self, count: int) -> list[int]:
        """The numbers of up to `count` living passes that are reached next, in that order.

        Nothing while the next is that of the latest event: backward has not come to it yet.
        """
        latest = self._latest
        if latest is None:
            return []
        known = self._round.next(count)
        numbers = self._guessed(latest, count) if known is None else known
        if numbers[:1] == [latest.number]:
            return []
        return [n for n in dict.fromkeys(numbers) if n in self._layers and n != latest.number]

    def _guessed(self, event: _Event, count: int) -> list[int]:
        """What the notes say is reached after an event."""
        numbers: list[int] = []
        while len(numbers) < count:
            offset = self._offset(event)
            number = event.number + (offset or 0)
            layer = self._layers.get(number)  # once: a pass may end at any time, on any thread
            if not offset or layer is None or number in numbers:
                break
            numbers.append(number)
            event = self._event(True, layer, number, event.alive - 1, event)
        return numbers

    def _event(
        self, reached: bool, layer: int, number: int, alive: int, before: _Event | None = None
    ) -> _Event:
        before = self._latest if before is None else before
        step = (reached, layer, 0 if before is None else number - before.number)
        history = (step,) if before is None else (*before.history[1 - _DEPTH :], step)
        # The hash alone: a history takes a kilobyte, and a false note costs no more than a miss.
        keys = (hash(history), (reached, layer, alive), (reached, layer))
        return _Event(reached, number, alive, history, keys)

    def _happened(self, event: _Event) -> None:
        if self._latest is not None:
            offset = event.number - self._latest.number if event.reached else None
            for key in self._latest.keys:
                self._next[key] = offset
                self._next.move_to_end(key)
            while len(self._next) > _MANY:
                self._next.popitem(last=False)
        self._round.add(*event.history[-1][:2], event.number)
        self._latest = event

    def _offset(self, event: _Event, keys: tuple[object, ...] | None = None) -> int | None:
        for key in event.keys if keys is None else keys:
            if key in self._next:
                return self._next[key]
        return -1 if event.reached else None
