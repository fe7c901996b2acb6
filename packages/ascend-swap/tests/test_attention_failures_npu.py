"""What a failed allocation or copy leaves behind, at every place of a step in turn."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_sim
from ascend_core.pinned import PinnedPool
from ascend_sim import Fault, FaultNotReachedError, Simulator
from ascend_swap import SwapAttentionConfig, swap_attention

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

LAYERS, BATCHES = 2, 3


class Layer(nn.Module):
    """Saves what it is given and what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.self_attention(x)
        return x + mixed


class Training:
    """A model of which nothing stays on the device, and steps of several micro-batches in flight.

    Args:
        model: On the CPU.
        pool: Of host memory.
        batches: How many micro-batches a step has.
    """

    def __init__(
        self, model: nn.Module, pool: PinnedPool | None = None, batches: int = BATCHES
    ) -> None:
        self.pool = PinnedPool() if pool is None else pool
        self.model = model.to("npu")
        self.handle = swap_attention(
            model, SwapAttentionConfig(min_bytes=1, keep_last=0), pool=self.pool
        )
        self.batches = [torch.randn(2, 16, 32).npu() for _ in range(batches)]

    def step(self) -> None:
        """Forward and backward of all. Nothing waits for the device."""
        waiting = []
        for x in self.batches:
            waiting.append(self.model(x).square().mean())
            if len(waiting) == 2:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()

    def outcome(self) -> Tensor:
        """All gradients of one more step, as one tensor on the CPU."""
        self.forget()
        self.step()
        parameters = self.model.parameters()
        gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).cpu()
        self.forget()
        return gradients

    def forget(self) -> None:
        """Drop the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def held(self) -> tuple[int, int]:
        """Bytes that are in use on the device, and in the pool. No garbage is collected."""
        torch.ones(
            1, device="npu", requires_grad=True
        ).backward()  # autograd's thread drops the last
        torch.npu.synchronize()
        torch.npu.empty_cache()  # which looks for blocks whose streams have come to their end
        active = torch.npu.memory_stats()["active_bytes.all.current"]
        return active, self.pool.stats().in_use_bytes


@pytest.fixture
def small() -> Training:
    torch.manual_seed(0)
    return Training(nn.Sequential(*(Layer() for _ in range(LAYERS))))


def failures(
    training: Training, simulator: Simulator, fault: Fault
) -> Iterator[tuple[str | None, str | None]]:
    """Fail at each place in turn, and say what `step` and the next wait then raise.

    Checks that nothing is left of a step that failed, and that the next one is right.
    """
    expected = training.outcome()
    for _ in range(2):  # the order is learnt
        assert torch.equal(training.outcome(), expected)
    before = training.held()
    assert before[1] == 0
    for nth in itertools.count(1):
        try:
            with simulator.fail(fault, nth):
                raised = error_of(training.step)
        except FaultNotReachedError:
            assert raised is None
            return
        told = error_of(torch.npu.synchronize)
        simulator.drain()
        simulator.take_error()  # as in a new process; memory stays
        training.forget()
        assert training.held() == before, nth
        assert torch.equal(training.outcome(), expected), nth
        yield raised, told


def error_of(call: Callable[[], Any]) -> str | None:
    """The kind, the text and the notes of what a call raises, and nothing that holds memory."""
    try:
        call()
    except RuntimeError as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    return None


def test_a_failed_allocation(small: Training, npu_sim: Simulator) -> None:
    absorbed = 0
    for raised, told in failures(small, npu_sim, Fault.DEVICE_ALLOCATION):
        assert told is None
        assert raised is None or raised.startswith("OutOfMemoryError")
        absorbed += raised is None
    # Of what is fetched ahead of need: it is asked for again when backward needs it.
    assert absorbed >= BATCHES * LAYERS


def test_a_fetch_that_finds_no_memory_says_what_for(
    small: Training, npu_sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = small.outcome()
    before = small.held()
    loss = small.model(small.batches[0]).square().mean()
    monkeypatch.setattr("ascend_swap._traffic._fetch", lambda _: None)  # nothing is fetched ahead
    raised = []
    for nth in range(1, 10):
        with npu_sim.fail(Fault.DEVICE_ALLOCATION, nth):
            raised.append(str(error_of(functools.partial(loss.backward, retain_graph=True))))
    assert any("has no 4096 bytes for values that come back" in text for text in raised)
    monkeypatch.undo()
    loss.backward()  # and nothing was lost
    del loss
    small.forget()
    assert small.held() == before
    assert torch.equal(small.outcome(), expected)


def test_a_copy_that_is_not_accepted(small: Training, npu_sim: Simulator) -> None:
    outward = []
    for raised, told in failures(small, npu_sim, Fault.COPY):
        assert raised is not None
        assert told is None
        assert "aclrtMemcpyAsync" in raised
        assert "the device did not take the copy" in raised
        outward.append("from npu:0 to cpu" in raised)
    # What is fetched in vain after a step that failed, and so which copy comes when, may vary.
    assert outward.count(True) >= BATCHES * LAYERS
    assert outward.count(False) >= BATCHES * LAYERS


def test_a_copy_that_fails_later(small: Training, npu_sim: Simulator) -> None:
    """The device stops; who learns of it first depends on when the copy runs."""
    places = 0
    for raised, told in failures(small, npu_sim, Fault.LATE_COPY):
        places += 1
        assert "injected fault" in f"{raised} {told}"
    assert places > 0


def test_where_no_host_memory_can_be_pinned_it_is_pageable(
    npu_sim: Simulator, small: Training
) -> None:
    expected = small.outcome()
    for nth in itertools.count(1):
        torch.manual_seed(0)
        other = Training(
            nn.Sequential(*(Layer() for _ in range(LAYERS))), PinnedPool(slab_bytes=1 << 12)
        )
        try:
            with (
                warnings.catch_warnings(record=True) as warned,
                npu_sim.fail(Fault.PINNED_ALLOCATION, nth),
            ):
                warnings.simplefilter("always")
                gradients = other.outcome()
        except FaultNotReachedError:
            break
        assert any("cannot be page-locked" in str(one.message) for one in warned)
        assert torch.equal(gradients, expected)
        assert other.held()[1] == 0
    assert nth > 2


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [Fault.DEVICE_ALLOCATION, Fault.COPY, Fault.LATE_COPY])
def test_at_every_place_of_a_transformer(fault: Fault, decoder: Any, npu_sim: Simulator) -> None:
    torch.manual_seed(0)
    for _ in failures(Training(decoder(2), batches=2), npu_sim, fault):
        pass
