"""What backward asks for next is known exactly from the round before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_swap import _order
from ascend_swap._order import BackwardOrder

# A schedule is a sequence of ("f", batch, chunk) and ("b", batch, chunk): all layers of a chunk
# forward, in order, or backward, in reverse.
Call = tuple[str, int, int]


class Run:
    """Drives a `BackwardOrder` through schedules, and counts what it knew.

    Args:
        layers: Of each chunk.
        unreached: Layers that backward passes over, and that die with the next.
    """

    def __init__(self, layers: int, unreached: frozenset[int] = frozenset()) -> None:
        self.order = BackwardOrder()
        self.hits = self.misses = self.in_vain = 0
        self._layers = layers
        self._unreached = unreached
        self._alive: dict[tuple[int, int], list[int]] = {}
        self._fetched: set[int] = set()

    def step(self, schedule: Iterable[Call], prefetch: int = 1) -> float:
        """Run one step, and return the share of passes that were fetched before they were asked."""
        self.hits = self.misses = self.in_vain = 0
        for kind, batch, chunk in schedule:
            for layer in self._in_order(kind):
                if kind == "f":
                    number = self.order.begin(chunk * self._layers + layer)
                    self._alive.setdefault((batch, chunk), []).append(number)
                    self._asks(number, prefetch)
                else:
                    self._goes_back(self._alive[batch, chunk][layer], layer, prefetch)
        return self.hits / (self.hits + self.misses)

    def _in_order(self, kind: str) -> Iterator[int]:
        return iter(range(self._layers) if kind == "f" else reversed(range(self._layers)))

    def _goes_back(self, number: int, layer: int, prefetch: int) -> None:
        if layer not in self._unreached:
            # The pass that has just begun is not fetched, it is there.
            if number in self._fetched or number == self._begun:
                self.hits += 1
            else:
                self.misses += 1
            self._begun = -1
            self.order.reach(number)
            self._asks(number, prefetch)
        self.order.end(number)
        self._fetched.discard(number)
        for numbers in self._alive.values():
            if numbers and numbers[0] == number:
                numbers.clear()

    def _asks(self, number: int, prefetch: int) -> None:
        """As `Traffic` does: what is no longer expected is dropped."""
        self._begun = number if self.order.turns_around() else -1
        expected = self.order.expected(prefetch)
        assert len(expected) <= prefetch
        assert number not in expected
        assert all(one in self.order._layers for one in expected)
        self.in_vain += len(self._fetched - {*expected, number})
        self._fetched = {*expected, *(self._fetched & {number})}

    _begun = -1


def accumulated(batches: int) -> list[Call]:
    """Gradient accumulation."""
    return [(kind, batch, 0) for batch in range(batches) for kind in "fb"]


def gpipe(batches: int, *, last_first: bool) -> list[Call]:
    """All forwards, then all backwards."""
    back = reversed(range(batches)) if last_first else range(batches)
    return [("f", batch, 0) for batch in range(batches)] + [("b", batch, 0) for batch in back]


def one_f_one_b(batches: int, ahead: int) -> list[Call]:
    """A stage of 1F1B: `ahead` forwards first, then one of each, then the backwards that are left.

    (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021.)
    """
    return interleaved([(batch, 0) for batch in range(batches)], ahead)


def interleaved(units: list[tuple[int, int]], ahead: int) -> list[Call]:
    """The same over the units (batch, chunk) of a stage with several chunks."""
    chunks = 1 + max(chunk for _, chunk in units)
    back = [(batch, chunks - 1 - chunk) for batch, chunk in units]
    calls: list[Call] = [("f", *unit) for unit in units[:ahead]]
    for forward, backward in zip(units[ahead:], back, strict=False):
        calls += [("f", *forward), ("b", *backward)]
    return calls + [("b", *unit) for unit in back[len(units) - min(ahead, len(units)) :]]


def in_groups(batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """The order of interleaved 1F1B: each chunk takes a group of micro-batches in turn."""
    return [
        (batch, chunk)
        for first in range(0, batches, group)
        for chunk in range(chunks)
        for batch in range(first, min(first + group, batches))
    ]


@st.composite
def schedules(draw: st.DrawFn) -> list[Call]:
    """Any of them."""
    batches = draw(st.integers(1, 7))
    kind = draw(st.sampled_from(["accumulated", "lifo", "fifo", "1f1b", "interleaved"]))
    if kind == "accumulated":
        return accumulated(batches)
    if kind in ("lifo", "fifo"):
        return gpipe(batches, last_first=kind == "lifo")
    if kind == "1f1b":
        return one_f_one_b(batches, draw(st.integers(0, batches)))
    chunks, group = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    units = in_groups(batches, chunks, group)
    # So far ahead that no backward comes before its forward.
    return interleaved(units, draw(st.integers(group * chunks, max(len(units), group * chunks))))


@given(schedules(), st.integers(1, 4))
def test_a_schedule_is_known_after_two_steps(schedule: list[Call], layers: int) -> None:
    run = Run(layers)
    run.step(schedule)
    run.step(schedule)
    assert run.step(schedule) == 1
    assert run.in_vain == 0


@given(schedules(), st.integers(1, 4))
def test_nothing_is_expected_of_the_past(schedule: list[Call], layers: int) -> None:
    run = Run(layers)
    for _ in range(3):
        run.step(schedule)
    assert not run.order._layers


@given(schedules(), schedules(), st.integers(1, 3), st.integers(0, 4))
def test_another_schedule_is_learnt_as_well(
    one: list[Call], other: list[Call], layers: int, prefetch: int
) -> None:
    run = Run(layers)
    for _ in range(2):
        run.step(one, prefetch)
    for _ in range(2):
        run.step(other, prefetch)
    assert run.step(other) == 1


def test_the_first_backward_is_guessed_to_be_that_of_the_layer_before() -> None:
    run = Run(8)
    # All but the one that it begins with.
    assert run.step(accumulated(1)) == 7 / 8


def test_a_layer_that_drops_out_of_the_loss_is_passed_over() -> None:
    run = Run(4, unreached=frozenset({2}))
    run.step(accumulated(2))
    assert run.step(accumulated(2)) == 1
    assert run.in_vain == 0


def test_a_pass_that_stays_alive_keeps_little_from_being_known() -> None:
    run = Run(4)
    run.order.begin(0)  # somebody holds a graph for ever
    for _ in range(2):
        run.step(one_f_one_b(8, 2))
    share = run.step(one_f_one_b(8, 2))
    # All but one: the latest events do not tell that no forward follows any more.
    assert 31 / 32 <= share <= 1


@given(st.lists(st.tuples(st.sampled_from(["begin", "reach", "end"]), st.integers(0, 9))))
def test_no_pass_is_expected_that_is_dead(events: list[tuple[str, int]]) -> None:
    order, alive = BackwardOrder(), list[int]()
    for kind, which in events:
        if kind == "begin":
            alive.append(order.begin(which % 4))
        elif alive and kind == "reach":
            order.reach(alive[which % len(alive)])
        elif alive:
            order.end(alive.pop(which % len(alive)))
        assert set(order.expected(3)) <= set(alive)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_order, "_LONGEST", 64)
    monkeypatch.setattr(_order, "_MANY", 64)
    order, drawn = BackwardOrder(), random.Random(0)
    alive = [order.begin(0)]
    for _ in range(2000):
        if len(alive) == 1 or drawn.random() < 0.5:
            alive.append(order.begin(drawn.randrange(100)))
        else:
            number = alive.pop(drawn.randrange(len(alive)))
            order.reach(number)
            order.end(number)
    assert len(order._round.events) == 64
    assert len(order._next) <= 64
    assert len(order._layers) == len(alive)
