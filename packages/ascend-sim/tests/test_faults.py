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


@pytest.mark.parametrize("fault", list(Fault))
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
        torch.npu.synchronize()  # nothing of the failure is left
    assert failures >= {Fault.PINNED_ALLOCATION: 1, Fault.COPY: 2}.get(fault, 4)
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
    assert x.add_(1).eq(2).all().item()  # neither of the two was added


def test_a_fault_strikes_once_and_at_its_place(npu_sim: Simulator) -> None:
    with npu_sim.fail(Fault.DEVICE_ALLOCATION, 2):
        torch.empty(N, device="npu")
        with pytest.raises(torch.OutOfMemoryError, match="injected fault: NPU out of memory"):
            torch.empty(N, device="npu")
        torch.empty(N, device="npu")


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
