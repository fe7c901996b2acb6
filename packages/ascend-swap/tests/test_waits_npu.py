"""Every wait that a step relies on, taken away: then some schedule computes something else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import ascend_sim
from ascend_core.device import backend_of
from ascend_core.pinned import HostBuffer, PinnedPool
from ascend_core.transfer import Transfer
from ascend_swap import SwapOptimizerConfig, swap_optimizer

SIZES = (7, 4097, 1_000_000)
WINDOWS = 5
RING_NUMEL = 401_792  # as many bytes as one buffer of the ring has

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)


def taking_turns(training: Any, *, ended: int | None = None) -> list[torch.Tensor]:
    """Steps among other work that has had, or will get, the memory of the ring.

    With `ended`, one of the streams of copies is at its end before the memory is taken again.
    """
    trained = training(SIZES, WINDOWS, fused=True)
    read = []
    for number in range(3):
        before = [torch.full((RING_NUMEL,), 2.0 + i, device="npu") for i in range(4)]
        read += [tensor * 3 for tensor in before]
        del before
        trained.step(number)
        if ended is not None:
            end(trained, ended)
        read += taken()
    return [*trained.outcome(), *(tensor.cpu() for tensor in read)]


def end(trained: Any, stream: int) -> None:
    """Wait for one of the streams of copies. Of the other nothing is known."""
    trained.optimizer._home.transfer._both_streams()[stream].synchronize()


def taken() -> list[torch.Tensor]:
    """Tensors for each block that is free, those of the ring among them."""
    return [torch.full((RING_NUMEL,), 7.0 + i, device="npu") for i in range(16)]


def interrupted(training: Any) -> list[torch.Tensor]:
    """A step that ends between a fetch and its use, and others' work in the memory it had."""
    trained = training(SIZES, WINDOWS, fused=True)
    trained.train(1)
    trained.backward(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascend_core.optim.engine._Step._computed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained.optimizer.step()
    end(trained, 0)
    read = taken()
    torch.npu.current_stream().synchronize()
    trained.optimizer.step()
    return [*trained.outcome(), *(tensor.cpu() for tensor in read)]


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def sharing(training: Any) -> list[torch.Tensor]:
    """State in host memory that a copy of somebody else was just about to write."""
    pool = PinnedPool(slab_bytes=1 << 16)
    Transfer("npu", pool=pool).to_host(torch.full((RING_NUMEL,), 3.0, device="npu")).release()
    weight = nn.Parameter(torch.ones(3000, device="npu"))
    plain = optim.AdamW([weight], fused=True)
    optimizer = swap_optimizer(plain, SwapOptimizerConfig(2), pool=pool)
    weight.grad = torch.ones(3000, device="npu")
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    return [weight.detach().cpu(), *(tensor.clone() for tensor in state.values())]


def queue_all(*, outward: bool = True, inward: bool = True) -> Callable[..., None]:
    """`Transfer._queue_all`, of which a stream may not wait for the current one."""

    def queue(self: Any, pairs: Any, stream: Any, after: Any, done: Any) -> None:
        if outward if stream == self._both_streams()[0] else inward:
            stream.wait_stream(self._backend.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with self._backend.stream_context(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done.record(stream)

    return queue


real_bring = Transfer.bring


def bring_after(kept: slice) -> Callable[..., Any]:
    """`Transfer.bring` behind some of the events: the way out of the window, that of the buffer."""
    return lambda self, pairs, after: real_bring(self, pairs, after=after[kept])


def tie(stream: int) -> Callable[..., None]:
    """`Transfer.tie` to one of both streams."""

    def one(self: Any, tensor: torch.Tensor) -> None:
        backend_of(self.device).record_stream(tensor, self._both_streams()[stream])

    return one


def nothing(*args: Any) -> None:
    pass


# What is taken away: whose method does without, where it shows, and in which schedule.
AWAY: dict[str, tuple[tuple[type, str, Any], Callable[[Any], list[torch.Tensor]], str]] = {
    "out waits for compute": (
        (Transfer, "_queue_all", queue_all(outward=False)),
        taking_turns,
        "early",
    ),
    "in waits for compute": (
        (Transfer, "_queue_all", queue_all(inward=False)),
        taking_turns,
        "early",
    ),
    "in waits for the way out of its window": (
        (Transfer, "bring", bring_after(slice(1, None))),
        taking_turns,
        "lazy",
    ),
    "in waits for the way out of its buffer": (
        (Transfer, "bring", bring_after(slice(0, 1))),
        taking_turns,
        "lazy",
    ),
    "compute waits for in": ((Transfer, "wait", nothing), taking_turns, "lazy"),
    "the ring is tied to out": ((Transfer, "tie", tie(1)), partial(taking_turns, ended=1), "lazy"),
    "the ring is tied to in": ((Transfer, "tie", tie(0)), interrupted, "lazy"),
    "who reads waits for out": ((Transfer, "finish_sends", nothing), taking_turns, "lazy"),
    "state waits for a copy before it": ((HostBuffer, "wait", nothing), sharing, "early"),
}


@pytest.mark.parametrize("name", AWAY)
def test_without_a_wait_a_schedule_goes_wrong(
    name: str, training: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, method, mutant), program, schedule = AWAY[name]
    assert running is not None
    if running.config.schedule != schedule:
        pytest.skip(f"shows under --npu-sim={schedule}")
    expected = program(training)
    monkeypatch.setattr(kind, method, mutant)
    assert not same(program(training), expected)


def test_the_mutant_that_leaves_nothing_out_is_right(
    training: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = taking_turns(training)
    monkeypatch.setattr(Transfer, "_queue_all", queue_all())
    monkeypatch.setattr(Transfer, "bring", bring_after(slice(None)))
    assert same(taking_turns(training), expected)


def test_others_memory_is_left_alone(training: Any, same: Any) -> None:
    """The programs' own numbers, which are known."""
    for program in (taking_turns, interrupted):
        read = program(training)[3 + 9 :]
        assert all((tensor == tensor[0]).all() for tensor in read)
        assert [tensor[0].item() for tensor in read[-4:]] == [19, 20, 21, 22]
    plain = training(SIZES, fused=True).train(3)
    assert same(taking_turns(training)[:12], plain)
    weight, *state = sharing(training)
    assert all((tensor == tensor.view(-1)[0]).all() for tensor in (weight, *state))
    assert state[1].view(-1)[0].item() == pytest.approx(0.1)
