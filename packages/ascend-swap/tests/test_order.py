"""The order of backward is learnt: pure, on schedules of pipelines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ascend_swap._order import _MANY, BackwardOrder

Event = tuple[str, int, int]  # forward or backward, chunk, micro-batch


def one_forward_one_backward(stage: int, stages: int, micros: int) -> Iterator[Event]:
    """A step of a pipeline's stage, whose model is one chunk."""
    ahead = stages - 1 - stage
    for micro in range(micros + ahead):
        if micro < micros:
            yield "forward", 0, micro
        if micro >= ahead:
            yield "backward", 0, micro - ahead


def interleaved(stage: int, stages: int, micros: int, chunks: int) -> Iterator[Event]:
    """A step of a pipeline's stage with several chunks of the model, as megatron-core runs it."""
    order = [
        (chunk, group + micro)
        for group in range(0, micros, stages)
        for chunk in range(chunks)
        for micro in range(stages)
    ]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    for number in range(len(order) + ahead):
        if number < len(order):
            yield "forward", *order[number]
        if number >= ahead:
            chunk, micro = order[number - ahead]
            yield "backward", chunks - 1 - chunk, micro


class Run:
    """Passes of layers, and how many were expected when backward reached them."""

    def __init__(self, layers: int) -> None:
        self.order = BackwardOrder()
        self.layers = layers
        self.hits = self.misses = self.turned = 0
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.latest = -1

    def step(self, events: Iterator[Event]) -> None:
        self.hits = self.misses = self.turned = 0
        for kind, chunk, micro in events:
            for layer in range(self.layers):
                if kind == "forward":
                    begun = self.order.begin(chunk * self.layers + layer)
                    self.numbers[chunk, micro, layer] = self.latest = begun
                else:
                    self.reach(self.numbers.pop((chunk, micro, self.layers - 1 - layer)))

    def reach(self, number: int) -> None:
        if number == self.latest:
            self.turned += 1
        elif number in self.order.expected(1):
            self.hits += 1
        else:
            self.misses += 1
        self.order.reach(number)
        self.order.end(number)
        self.latest = -1


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_third_step_of_a_schedule_is_known(stages: int, chunks: int, layers: int) -> None:
    for stage in range(stages):
        run = Run(layers)
        for _ in range(3):
            if chunks == 1:
                run.step(one_forward_one_backward(stage, stages, 8))
            else:
                run.step(interleaved(stage, stages, 8, chunks))
        assert run.misses == 0
        assert run.hits + run.misses + run.turned == 8 * chunks * layers


def test_a_model_without_a_pipeline_is_known_at_once() -> None:
    run = Run(4)
    run.step(one_forward_one_backward(0, 1, 1))
    assert (run.hits, run.misses, run.turned) == (3, 0, 1)
    run.step(one_forward_one_backward(0, 1, 3))
    assert (run.hits, run.misses, run.turned) == (9, 0, 3)


def test_notes_do_not_grow_without_end() -> None:
    order = BackwardOrder()
    for number in range(2 * _MANY):  # every pass is another layer's, so nothing ever repeats
        order.end(order.begin(number))
    assert len(order._next) <= _MANY
