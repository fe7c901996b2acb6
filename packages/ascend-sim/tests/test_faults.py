"""Injected faults, and errors of kernels that ran after their submission returned."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from ascend_sim import ConfigError, Fault, FaultNotReachedError, Simulator

N = 64
Run = Callable[..., str]


def step(w: torch.Tensor, host: torch.Tensor) -> None:
    """A step with a pinned H2D copy, forward, backward, and a D2H copy."""
    x = host.pin_memory().to("npu", non_blocking=True)
    (x @ w).sigmoid().sum().backward()
    assert w.grad is not None
    w.grad.sum().item()


@pytest.fixture
def model() -> tuple[torch.Tensor, torch.Tensor]:
    w, host = torch.full((N, N), 0.01, device="npu", requires_grad=True), torch.ones(N, N)
    step(w, host)
    return w, host


@pytest.mark.parametrize("fault", [one for one in Fault if one is not Fault.DEVICE_SEGMENT])
def test_a_walk_through_a_step_fails_at_each_place_and_recovers(
    fault: Fault, model: tuple[torch.Tensor, torch.Tensor], npu_sim: Simulator
) -> None:
    w, host = model
    assert w.grad is not None
    expected = w.grad.clone()
    expected_error = torch.OutOfMemoryError if fault is Fault.DEVICE_ALLOCATION else RuntimeError
    struck = npu_sim.counters().faults_injected
    failures = 0
    for nth in itertools.count(1):
        w.grad = None
        try:
            with npu_sim.fail(fault, nth):
                step(w, host)
        except FaultNotReachedError as error:
            assert f"with {failures} of them" in str(error)
            break
        except expected_error as error:
            assert "injected fault" in str(error)
            failures += 1
        npu_sim.drain()
        assert npu_sim.take_error() is None  # the step was told
        torch.npu.synchronize()  # nothing of the failure is left
    least = {Fault.PINNED_ALLOCATION: 1, Fault.COPY: 2, Fault.LATE_COPY: 2}
    assert failures >= least.get(fault, 4)
    assert npu_sim.counters().faults_injected - struck == failures
    w.grad = None
    step(w, host)
    assert torch.equal(w.grad, expected)


def test_a_kernels_failure_surfaces_at_the_next_synchronisation(npu_sim: Simulator) -> None:
    x = torch.ones(N, device="npu")
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL):
        x.add_(1)
    with pytest.raises(RuntimeError, match="injected fault"):
        torch.npu.synchronize()


WAYS_TO_LEARN: dict[str, Callable[[torch.Tensor], object]] = {
    "stream": lambda x: torch.npu.current_stream().synchronize(),
    "device": lambda x: torch.npu.synchronize(),
    "item": lambda x: x[0].item(),
    "operator": lambda x: x + 1,
    "copy to the device": lambda x: torch.ones(N).to("npu"),
    "copy to the host": lambda x: x.cpu(),
    "asynchronous copy": lambda x: x.copy_(torch.ones(N, pin_memory=True), non_blocking=True),
    "operator that waits": lambda x: x.nonzero(),
    "other stream": lambda x: torch.npu.Stream().synchronize(),
}


@pytest.mark.parametrize("fault", [Fault.KERNEL, Fault.LATE_COPY])
@pytest.mark.parametrize("way", WAYS_TO_LEARN)
def test_a_device_that_has_stopped_says_so_every_time(
    fault: Fault, way: str, npu_sim: Simulator
) -> None:
    """torch_npu asks for ACL_STOP_ON_FAILURE; nobody is told once, and others never."""
    x, host = torch.ones(N, device="npu"), torch.ones(N, pin_memory=True)
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with npu_sim.fail(fault), torch.npu.stream(side):
        if fault is Fault.LATE_COPY:
            x.copy_(host, non_blocking=True)
        else:
            x.add_(1)
    npu_sim.drain()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"has stopped until it is reset: .*injected fault"):
            WAYS_TO_LEARN[way](x)
    assert npu_sim.take_error() is None
    WAYS_TO_LEARN[way](x)


@pytest.mark.schedules("lazy")
def test_what_a_stopped_device_still_had_to_do_is_dropped(npu_sim: Simulator) -> None:
    """On all streams: by CANN's documentation the mode is the whole context's."""
    x, y = torch.zeros(N, device="npu"), torch.zeros(N, device="npu")
    other = torch.npu.Stream()
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL, 2):
        x.add_(1)
        x.add_(2)
        x.add_(4)
    event = torch.npu.Event()
    event.record()
    other.wait_event(event)
    with torch.npu.stream(other):
        y.add_(1)
    with pytest.raises(RuntimeError, match="injected fault"):
        other.synchronize()
    assert event.query()  # a loop that polls ends
    npu_sim.take_error()
    assert x.eq(1).all().item()
    assert y.eq(0).all().item()


def test_an_error_that_nobody_was_told_of_is_returned_where_it_is_taken(
    npu_sim: Simulator,
) -> None:
    x = torch.ones(N, device="npu")
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL):
        x.add_(1)
    npu_sim.drain()
    text = npu_sim.take_error()
    assert text is not None
    assert "injected fault" in text
    assert npu_sim.take_error() is None
    torch.npu.synchronize()


@pytest.mark.parametrize("kind", ["stream", "event", "device", "item"])
def test_every_kind_of_synchronisation_raises_it(kind: str, npu_sim: Simulator) -> None:
    x, event = torch.ones(N, device="npu"), torch.npu.Event()
    wait = {
        "stream": torch.npu.current_stream().synchronize,
        "event": event.synchronize,
        "device": torch.npu.synchronize,
        "item": x[0].item,
    }[kind]
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL):
        x.add_(1)
        event.record()
    with pytest.raises(RuntimeError, match="injected fault"):
        wait()


@pytest.mark.schedules("eager")
def test_a_kernels_failure_surfaces_at_the_next_operator(npu_sim: Simulator) -> None:
    x = torch.ones(N, device="npu")
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL):
        x.add_(1)
    with pytest.raises(RuntimeError, match="injected fault"):
        x.add_(1)
    npu_sim.take_error()
    assert x.add_(1).eq(2).all().item()  # neither of the two was added


def test_a_fault_strikes_once_and_at_its_place(npu_sim: Simulator) -> None:
    with npu_sim.fail(Fault.DEVICE_ALLOCATION, 2):
        torch.empty(N, device="npu")
        with pytest.raises(torch.OutOfMemoryError, match="injected fault: NPU out of memory"):
            torch.empty(N, device="npu")
        torch.empty(N, device="npu")


def test_where_the_runtime_has_no_more_a_cache_goes_on_until_it_is_empty(
    npu_sim: Simulator,
) -> None:
    torch.npu.empty_cache()
    cached = torch.empty(1 << 20, dtype=torch.float32, device="npu")
    with npu_sim.fail(Fault.DEVICE_SEGMENT):
        del cached
        kept = torch.empty(1 << 20, dtype=torch.float32, device="npu")
        for _ in range(2):  # it lasts
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(64 << 20, device="npu")
    torch.empty(64 << 20, device="npu")
    del kept
    with pytest.raises(FaultNotReachedError), npu_sim.fail(Fault.DEVICE_SEGMENT):
        torch.empty(64 << 20, device="npu")


def test_a_block_that_raises_for_itself_disarms_the_fault(npu_sim: Simulator) -> None:
    with pytest.raises(KeyError), npu_sim.fail(Fault.PINNED_ALLOCATION, 1):
        raise KeyError
    torch.empty(N, pin_memory=True)


def test_the_first_occurrence_is_1(npu_sim: Simulator) -> None:
    for nth in (0, -1, 1.5, True, "1"):
        with pytest.raises(ConfigError, match=f"nth={nth!r}"), npu_sim.fail(Fault.COPY, nth):
            pass


def test_what_is_no_fault_or_fate_is_refused(npu_sim: Simulator) -> None:
    wrong = pytest.raises(ConfigError, match=r"'copy' is no fault.\n.*Fault\.COPY")
    with wrong, npu_sim.fail("copy"):
        pass
    with pytest.raises(ConfigError, match=r"'left' is no fate.\n.*Fate\.LEFT"):
        npu_sim.operators("left")


def test_one_block_waits_for_a_fault_at_a_time(npu_sim: Simulator) -> None:
    with npu_sim.fail(Fault.DEVICE_ALLOCATION, 2):
        torch.empty(N, device="npu")
        twice = pytest.raises(ConfigError, match=r"Fault\.DEVICE_ALLOCATION is awaited already")
        with twice, npu_sim.fail(Fault.DEVICE_ALLOCATION, 7):
            pass
        with pytest.raises(torch.OutOfMemoryError, match="injected fault"):
            torch.empty(N, device="npu")


def test_blocks_of_different_faults_may_be_nested(npu_sim: Simulator) -> None:
    with npu_sim.fail(Fault.DEVICE_ALLOCATION), npu_sim.fail(Fault.PINNED_ALLOCATION):
        with pytest.raises(RuntimeError, match="out of pinned host memory"):
            torch.empty(N, pin_memory=True)
        with pytest.raises(torch.OutOfMemoryError, match="injected fault"):
            torch.empty(N, device="npu")
