"""What a failed allocation, copy or kernel leaves behind, at every place of a step in turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import ascend_sim
from ascend_core.errors import OptimizerFailedError
from ascend_sim import Fault, FaultNotReachedError, Simulator

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

SIZES = (7, 4097, 200)
FORMS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "masters": {"fused": True, "dtype": torch.bfloat16, "master_weights": True},
}


class Attempts:
    """Trainings that have done one step, and of which the next one fails at another place each."""

    def __init__(
        self,
        training: Any,
        simulator: Simulator,
        fault: Fault,
        form: str,
        sizes: Sequence[int] = SIZES,
        times: int = 4,
    ) -> None:
        self._make = functools.partial(training, sizes, times, **FORMS[form])
        self._simulator = simulator
        self._fault = fault
        whole = self._make()
        self.before, self.after, self.later = whole.train(1), whole.train(1, 1), whole.train(1, 2)

    def __iter__(self) -> Iterator[tuple[Any, Exception | None]]:
        """Each training after its failure, and what `step` raised."""
        for nth in itertools.count(1):
            training = self._make()
            training.train(1)
            training.backward(1)
            self._simulator.drain()
            raised = None
            try:
                with self._simulator.fail(self._fault, nth):
                    try:
                        training.optimizer.step()
                    except Exception as error:
                        raised = error
            except FaultNotReachedError:
                assert raised is None
                return
            yield training, raised


@pytest.mark.parametrize("form", ["fused", "masters"])
def test_a_failed_allocation_leaves_all_unstepped(
    form: str, training: Any, same: Any, npu_sim: Simulator
) -> None:
    attempts = Attempts(training, npu_sim, Fault.DEVICE_ALLOCATION, form)
    places = 0
    for trained, raised in attempts:
        places += 1
        assert isinstance(raised, torch.OutOfMemoryError)
        assert same(trained.outcome(), attempts.before)
        trained.optimizer.step()
        assert same(trained.outcome(), attempts.after)
    assert places == 4  # a ring of three, and scratch


def test_state_without_room_on_the_device_is_given_back_in_host_memory(
    training: Any, same: Any, npu_sim: Simulator
) -> None:
    reference = training(SIZES, fused=True)
    reference.train(3)
    places = 0
    for nth in itertools.count(1):
        trained = training(SIZES, 3, fused=True)
        swapped = trained.optimizer
        before = trained.train(2)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                with npu_sim.fail(Fault.DEVICE_ALLOCATION, nth):
                    swapped.remove()
        except FaultNotReachedError:
            assert not warned
            break
        places += 1
        assert ["AdamW has no room on npu:0" in str(one.message) for one in warned] == [True]
        assert warned[0].filename == __file__
        plain = trained.optimizer = swapped._inner
        kept = [one for state in plain.state.values() for one in state.values()]
        assert {one.device.type for one in kept} == {"cpu"}
        assert same(trained.outcome(), before)
        plain.load_state_dict(plain.state_dict())
        assert {plain.state[p]["exp_avg"].device.type for p in trained.parameters} == {"npu"}
        trained.backward(2)
        plain.step()
        assert same(trained.outcome(), reference.outcome())
    assert places == 3 * len(SIZES)  # the step count and two moments of each parameter


# Three windows of the same size, whose temporaries come from the allocator's pool of large blocks,
# from that of small ones, and from both: the second needs most small ones, the third most blocks.
MIXED = (1_044_480, *[261_120] * 4, *[1024] * 5, 1_039_360)


def taken_from_cache(simulator: Simulator) -> list[torch.Tensor]:
    """All that the allocator could give without asking the runtime."""
    torch.npu.synchronize()
    gc.collect()
    torch.npu.empty_cache()
    taken = []
    for nbytes in ((1 << 20) + 512, 1 << 20, 1 << 16, 1 << 12, 512):  # one pool, then the other
        with simulator.fail(Fault.DEVICE_SEGMENT), contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(nbytes, dtype=torch.uint8, device="npu"))
    return taken


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_where_the_runtime_has_no_memory_nothing_is_stepped(
    form: str, offloads: bool, training: Any, same: Any, npu_sim: Simulator
) -> None:
    """What is allocated is what the allocator's cache does not hold, and it holds nothing here.

    Gradients that are offloaded come in through a buffer of their own, which the trial has too.
    """
    places = 0
    make = functools.partial(training, MIXED, 3, offload_gradients=offloads, **FORMS[form])
    whole = make()
    before, after = whole.train(1), whole.train(1, 1)
    del whole
    for nth in itertools.count(1):
        trained = make()
        trained.train(1)
        trained.backward(1)
        filling = taken_from_cache(npu_sim)
        pinned = npu_sim.counters().pinned_segments
        try:
            with npu_sim.fail(Fault.DEVICE_SEGMENT, nth):
                trained.optimizer.step()
        except FaultNotReachedError:
            break
        except torch.OutOfMemoryError:
            places += 1
        assert npu_sim.counters().pinned_segments == pinned  # a step pins nothing
        del filling
        assert same(trained.outcome(), before), nth
        trained.optimizer.step()
        assert same(trained.outcome(), after), nth
    assert places


@pytest.mark.parametrize("form", ["foreach", "for-loop"])
def test_a_request_that_the_cache_could_serve_and_that_fails_leaves_a_step_to_finish(
    form: str, training: Any, same: Any, npu_sim: Simulator
) -> None:
    """Torch's own arithmetic asks the allocator in every window, which serves it from its cache.

    That such a request fails is no lack of memory. This fault, at the allocator's door, stands for
    what else may be raised there; it may leave a step in the middle, and that can be finished.
    """
    attempts = Attempts(training, npu_sim, Fault.DEVICE_ALLOCATION, form)
    unstepped = interrupted = 0
    for trained, raised in attempts:
        assert isinstance(raised, torch.OutOfMemoryError)
        try:
            outcome = trained.outcome()
        except OptimizerFailedError as error:
            assert "call step() again" in str(error)
            interrupted += 1
        else:
            assert same(outcome, attempts.before)
            unstepped += 1
        trained.optimizer.step()
        assert same(trained.outcome(), attempts.after)
    assert unstepped > 4  # in the first window too, and where another one is tried before
    assert interrupted  # if there is none, this test says no more than the one above


def runs_out_of(free: Any, trained: Any, mebibytes: int) -> bool:
    """Step once, with so much device memory left. True where that was too little."""
    with free(mebibytes << 20):
        try:
            trained.optimizer.step()
        except torch.OutOfMemoryError:
            return True
    return False


def test_where_memory_really_runs_out_nothing_was_stepped(
    training: Any, same: Any, free: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What later windows need was tried before the first write: the allocator has it."""

    def attempt(mebibytes: int) -> tuple[Any, bool]:
        # The temporaries of the first window are small blocks, those of the others large ones.
        trained = training([*[200_000] * 8, 6_400_000], 4, foreach=True)
        trained.backward(0)
        return trained, runs_out_of(free, trained, mebibytes)

    assert not attempt(120)[1]
    trained, ran_out = attempt(78)  # enough for the ring, the scratch and the first window
    assert ran_out
    outcome = trained.outcome()
    del trained
    assert same(outcome, training([*[200_000] * 8, 6_400_000], 4, foreach=True).outcome())

    monkeypatch.setattr("ascend_core.optim.engine._Step._rehearsals", lambda step: ())
    trained, ran_out = attempt(78)  # the twin: without the trial it ends in the middle
    assert ran_out
    with pytest.raises(OptimizerFailedError, match="in the middle of a step"):
        trained.optimizer.state_dict()


def test_where_no_host_memory_can_be_pinned_it_is_pageable_and_steps_are_the_same(
    training: Any, same: Any, npu_sim: Simulator
) -> None:
    expected = training(SIZES, fused=True).train(3)
    for nth in itertools.count(1):
        warned = pytest.warns(RuntimeWarning, match="cannot be page-locked")
        try:
            with warned, npu_sim.fail(Fault.PINNED_ALLOCATION, nth):
                trained = training(SIZES, 4, fused=True)
        except (FaultNotReachedError, pytest.fail.Exception):
            break
        assert same(trained.train(3), expected)
    assert nth > 1


def expect_failed(trained: Any) -> None:
    """Every use of the optimizer says that it failed, and each says it every time."""
    optimizer = trained.optimizer
    for use in (optimizer.state_dict, lambda: optimizer.state, optimizer.step) * 2:
        with pytest.raises(OptimizerFailedError, match="load the last checkpoint"):
            use()


def user_is_told(trained: Any) -> bool:
    """Whether waits that are not the optimizer's raise: for the weights, then for all streams."""
    told = False
    for wait in (lambda: trained.parameters[0].detach().sum().item(), torch.npu.synchronize):
        try:
            wait()
        except RuntimeError as error:
            assert "injected fault" in str(error)
            told = True
    return told


@pytest.mark.parametrize("user_first", [False, True])
@pytest.mark.parametrize("form", ["fused", "foreach", "for-loop", "masters"])
@pytest.mark.parametrize("fault", [Fault.COPY, Fault.KERNEL, Fault.LATE_COPY])
def test_after_a_failed_copy_or_kernel_only_a_checkpoint_helps(
    fault: Fault, form: str, user_first: bool, training: Any, same: Any, npu_sim: Simulator
) -> None:
    attempts = Attempts(training, npu_sim, fault, form)
    saved = training(SIZES, 4, **FORMS[form])
    saved.train(1)
    weights, checkpoint = (
        [p.detach().clone() for p in saved.parameters],
        saved.optimizer.state_dict(),
    )
    for trained, raised in attempts:
        assert raised is None or isinstance(raised, OptimizerFailedError)
        if user_first:
            # A copy that is not accepted is the optimizer's to tell alone.
            assert user_is_told(trained) is (fault is not Fault.COPY)
        # Where kernels run later, the one that failed is known from here on.
        expect_failed(trained)
        if fault is not Fault.COPY:
            with pytest.raises(OptimizerFailedError, match="in a new process where the device"):
                trained.optimizer.load_state_dict(checkpoint)  # which is no reset of the device
        npu_sim.drain()
        npu_sim.take_error()
        expect_failed(trained)  # and a reset is no load
        with torch.no_grad():
            for parameter, weight in zip(trained.parameters, weights, strict=True):
                parameter.copy_(weight)
        trained.optimizer.load_state_dict(checkpoint)
        trained.backward(1)
        trained.optimizer.step()
        assert same(trained.outcome(), attempts.after)
        trained._scheduler.step()
        assert same(trained.train(1, 2), attempts.later)


def test_a_resident_optimizer_knows_of_a_failure_that_somebody_else_was_told_of(
    training: Any, npu_sim: Simulator
) -> None:
    trained = training(SIZES, 4, fused=True, resident=True)
    trained.train(1)
    trained.backward(1)
    with npu_sim.fail(Fault.KERNEL, 2), contextlib.suppress(OptimizerFailedError):
        trained.optimizer.step()
    assert user_is_told(trained)
    expect_failed(trained)


def test_a_failure_that_shows_in_the_next_step_is_the_optimizers_too(
    training: Any, npu_sim: Simulator
) -> None:
    trained = training(SIZES, 4, fused=True)
    trained.train(1)
    trained.backward(1)
    with npu_sim.fail(Fault.KERNEL):
        trained.parameters[0].detach().add_(1)
        npu_sim.drain()
    with pytest.raises(OptimizerFailedError, match="load the last checkpoint"):
        trained.optimizer.step()


LARGER = (7, 4097, 200, 1, 30_000, 129, 8192)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fault", [Fault.DEVICE_ALLOCATION, Fault.COPY, Fault.KERNEL, Fault.LATE_COPY]
)
def test_at_every_place_of_a_larger_model(
    fault: Fault, form: str, training: Any, same: Any, npu_sim: Simulator
) -> None:
    """Unstepped, to be finished, or failed: and never anything else."""
    attempts = Attempts(training, npu_sim, fault, form, LARGER, 9)
    for trained, raised in attempts:
        if fault is not Fault.DEVICE_ALLOCATION:
            expect_failed(trained)
            npu_sim.drain()
            npu_sim.take_error()
            continue
        assert isinstance(raised, torch.OutOfMemoryError)
        trained.optimizer.step()
        assert same(trained.outcome(), attempts.after)
