"""RNG capture and replay: the same numbers again, and nobody else notices."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from ascend_core.rng import RngState
from ascend_core.testing import parametrize_devices


def drawn(device: torch.device) -> torch.Tensor:
    return torch.rand(8, device=device).cpu()


@parametrize_devices()
def test_a_replay_draws_the_same_and_leaves_the_stream_where_it_was(
    device: torch.device,
) -> None:  # AR-06
    torch.manual_seed(1)
    x = torch.ones(64, device=device)
    state = RngState.capture([device])
    mask = F.dropout(x, 0.5).cpu()
    ambient = RngState.capture([device])
    expected_next = drawn(device)
    ambient.restore()
    with state.replaying():
        assert torch.equal(F.dropout(x, 0.5).cpu(), mask)
    assert torch.equal(drawn(device), expected_next)


@parametrize_devices()
def test_a_replay_that_raises_leaves_the_stream_where_it_was(device: torch.device) -> None:
    state = RngState.capture([device])
    drawn(device)
    ambient = RngState.capture([device])
    expected_next = drawn(device)
    ambient.restore()
    with pytest.raises(KeyError), state.replaying():
        drawn(device)
        raise KeyError
    assert torch.equal(drawn(device), expected_next)


@parametrize_devices()
def test_the_cpu_is_always_captured_and_each_device_once(device: torch.device) -> None:
    state = RngState.capture([device, device, torch.device("cpu")])
    assert len(state.others) == (0 if device.type == "cpu" else 1)
    first = torch.rand(3)
    with state.replaying():
        assert torch.equal(torch.rand(3), first)


def test_replays_nest() -> None:
    outer = RngState.capture()
    a = torch.rand(2)
    inner = RngState.capture()
    b = torch.rand(2)
    ambient = RngState.capture()
    with outer.replaying():
        assert torch.equal(torch.rand(2), a)
        with inner.replaying():
            assert torch.equal(torch.rand(2), b)
        assert torch.equal(torch.rand(2), b)  # the outer replay goes on where it was
    assert torch.equal(RngState.capture().cpu, ambient.cpu)


def test_a_pending_normal_is_part_of_the_state() -> None:
    torch.manual_seed(3)
    torch.randn(1)  # draws two, keeps one
    state = RngState.capture()
    expected = torch.randn(3)
    torch.rand(5)
    with state.replaying():
        assert torch.equal(torch.randn(3), expected)


def test_capturing_draws_nothing() -> None:
    before = torch.get_rng_state()
    RngState.capture()
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_that_replay_at_once_each_get_their_own_numbers() -> None:
    states, expected = [], []
    for _ in range(4):
        states.append(RngState.capture())
        expected.append([torch.rand(10) for _ in range(5)])
    ambient = torch.get_rng_state()
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            with states[i].replaying():
                drawn = [torch.rand(10) for _ in range(5)]
            if not torch.equal(torch.cat(drawn), torch.cat(expected[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(torch.get_rng_state(), ambient)


@parametrize_devices()
def test_what_a_replay_waits_for_may_replay_in_other_threads(device: torch.device) -> None:
    # Autograd runs a device's backward in that device's thread, and a backward that more than 60
    # others wait for in another one of its own.
    state = RngState.capture([device])
    expected = drawn(device)
    threads, wrong = set(), []

    def descend(depth: int) -> None:
        threads.add(threading.get_ident())
        with state.replaying(), torch.enable_grad():
            if depth == 0:
                return
            doubled = torch.ones(2, device=device, requires_grad=True) * 2
            doubled.register_hook(lambda _: descend(depth - 1))
            doubled.sum().backward()
            if not torch.equal(drawn(device), expected):
                wrong.append(depth)

    runner = threading.Thread(target=descend, args=(70,), daemon=True)
    runner.start()
    runner.join(timeout=300)
    assert not runner.is_alive(), "the threads wait for one another"
    assert len(threads) > 1 and not wrong
