"""The host pool: no overlap, within its budget, all of it back, and one warning at most."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_core import pinned
from ascend_core.device import current_backend
from ascend_core.errors import BudgetExceededError, ConfigError, HostMemoryError
from ascend_core.pinned import HostBuffer, PinnedPool
from ascend_core.streams import InlineEvent

SLAB = 1 << 12


@pytest.fixture(params=[False, None], ids=["pageable", "as_the_machine_allows"])
def pool(request: pytest.FixtureRequest) -> PinnedPool:
    return PinnedPool(pin=request.param, slab_bytes=SLAB)


def span(buffer: HostBuffer) -> range:
    start = buffer.tensor.data_ptr()
    return range(start, start + buffer.tensor.numel())


def test_a_buffer_is_bytes_of_host_memory(pool: PinnedPool) -> None:
    buffer = pool.allocate(100)
    assert buffer.tensor.shape == (100,)
    assert buffer.tensor.dtype == torch.uint8
    assert buffer.tensor.device.type == "cpu"
    assert not buffer.is_released
    assert buffer.last_use == ()


def test_an_accelerator_gets_pinned_memory_and_the_cpu_pageable() -> None:
    pool = PinnedPool()
    buffer = pool.allocate(100)
    assert buffer.tensor.is_pinned() == current_backend().can_pin
    assert pool.stats().pinned == current_backend().can_pin


def test_making_a_pool_reserves_nothing() -> None:
    stats = PinnedPool().stats()
    assert set(dataclasses.asdict(stats).values()) == {0}


def test_buffers_are_aligned_and_packed_without_rounding_to_powers_of_two() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    buffers = [pool.allocate(n) for n in (65, 1025, 2049)]
    assert all(b.tensor.data_ptr() % 64 == 0 for b in buffers)
    stats = pool.stats()
    assert stats.in_use_bytes == 128 + 1088 + 2112  # powers of two would need 128 + 2048 + 4096
    assert stats.reserved_bytes == SLAB
    assert stats.slabs == 1


def test_a_buffer_larger_than_a_slab_gets_one_of_its_own_and_its_rest_is_used() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    big = pool.allocate(3 * SLAB + 1)
    assert pool.stats().reserved_bytes == 3 * SLAB + 64
    big.release()
    small = [pool.allocate(SLAB) for _ in range(3)]
    assert pool.stats().reserved_bytes == 3 * SLAB + 64
    assert pool.stats().in_use_bytes == len(small) * SLAB


def test_an_empty_buffer_reserves_nothing(pool: PinnedPool) -> None:
    buffer = pool.allocate(0)
    assert buffer.tensor.shape == (0,)
    buffer.release()
    assert pool.stats().reserved_bytes == pool.stats().in_use_bytes == 0


def test_released_memory_is_reused(pool: PinnedPool) -> None:
    first = pool.allocate(1000)
    address = first.tensor.data_ptr()
    first.release()
    first.release()
    assert first.is_released
    second = pool.allocate(1000)
    assert second.tensor.data_ptr() == address
    stats = pool.stats()
    assert (stats.allocations, stats.reuses, stats.slabs) == (2, 1, 1)


def test_a_dropped_buffer_comes_back_without_the_collector(pool: PinnedPool) -> None:
    gc.disable()
    try:
        buffer = pool.allocate(1000)
        assert pool.stats().in_use_bytes == 1024
        del buffer
        assert pool.stats().in_use_bytes == 0
    finally:
        gc.enable()


def test_a_buffer_outlives_its_pool() -> None:
    pool = PinnedPool(pin=False)
    buffer = pool.allocate(100)
    buffer.tensor.fill_(7)
    del pool
    assert bool((buffer.tensor == 7).all())


def test_peaks_stay_when_memory_comes_back(pool: PinnedPool) -> None:
    for buffer in [pool.allocate(SLAB) for _ in range(3)]:
        buffer.release()
    pool.trim()
    stats = pool.stats()
    assert (stats.peak_in_use_bytes, stats.peak_reserved_bytes) == (3 * SLAB, 3 * SLAB)
    assert (stats.in_use_bytes, stats.reserved_bytes) == (0, 0)


def test_over_budget_the_error_says_needed_available_and_what_instead() -> None:
    pool = PinnedPool(SLAB, pin=False, slab_bytes=SLAB)
    kept = pool.allocate(1000)
    kept.tensor.fill_(7)
    with pytest.raises(BudgetExceededError, match="needs 3520 bytes and has 0 available") as caught:
        pool.allocate(3500)
    assert caught.value.why == (
        "its budget is 4096 bytes; 4096 are reserved for slabs that hold 1024 bytes in use."
    )
    assert f"at least {SLAB + 3520} bytes" in str(caught.value.instead)
    assert pool.stats().in_use_bytes == 1024
    assert bool((kept.tensor == 7).all())
    pool.allocate(3000)


def test_a_budget_below_the_usual_slab_can_be_used_to_the_last_byte() -> None:
    pool = PinnedPool(1000, pin=False)
    pool.allocate(960)
    assert pool.stats().reserved_bytes == 960


def test_free_slabs_make_room_for_a_larger_buffer_within_the_budget() -> None:
    pool = PinnedPool(2 * SLAB, pin=False, slab_bytes=SLAB)
    for buffer in [pool.allocate(SLAB), pool.allocate(SLAB)]:
        buffer.release()
    assert pool.allocate(2 * SLAB).tensor.numel() == 2 * SLAB
    assert pool.stats().reserved_bytes == 2 * SLAB


def test_pinned_slabs_are_powers_of_two_and_counted_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Page-locking itself needs an accelerator; how the pool counts does not.
    monkeypatch.setattr(pinned, "_empty", lambda n, pin: torch.empty(n, dtype=torch.uint8))
    pool = PinnedPool(7 * SLAB, pin=True, slab_bytes=SLAB)
    first = pool.allocate(2 * SLAB + 1)
    assert pool.stats().reserved_bytes == 4 * SLAB
    with pytest.raises(BudgetExceededError, match="once page-locked, a power of two"):
        pool.allocate(2 * SLAB + 1)
    assert first.tensor.numel() + pool.allocate(2 * SLAB).tensor.numel() == 4 * SLAB + 1


def refuse_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pinned._empty

    def empty(nbytes: int, *, pin: bool) -> torch.Tensor:
        if pin:
            raise RuntimeError("cannot lock pages\nand a long trace")
        return real(nbytes, pin=pin)

    monkeypatch.setattr(pinned, "_empty", empty)


def test_where_pinning_fails_the_pool_warns_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_to_pin(monkeypatch)
    pool = PinnedPool(pin=True, slab_bytes=SLAB)
    with pytest.warns(RuntimeWarning, match=r"cannot be page-locked.*: cannot lock pages$") as told:
        buffers = [pool.allocate(SLAB) for _ in range(3)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert not pool.stats().pinned
    assert len(buffers) == 3


def test_a_warning_that_is_an_error_leaves_the_pool_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_to_pin(monkeypatch)
    pool = PinnedPool(pin=True, slab_bytes=SLAB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            pool.allocate(10)
        assert pool.stats().in_use_bytes == 0
        assert pool.allocate(10).tensor.numel() == 10


@pytest.mark.skipif(current_backend().can_pin, reason="this machine can page-lock")
def test_pinning_that_this_machine_lacks_falls_back_with_a_warning() -> None:
    pool = PinnedPool(pin=True)
    with pytest.warns(RuntimeWarning, match="cannot be page-locked"):
        assert pool.allocate(10).tensor.numel() == 10


def test_a_host_without_memory_is_a_clear_error() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    kept = pool.allocate(10)
    with pytest.raises(HostMemoryError, match="the host has no") as caught:
        pool.allocate(1 << 60)
    assert not isinstance(caught.value, BudgetExceededError)
    assert kept.tensor.numel() == 10
    assert pool.allocate(10).tensor.numel() == 10


@pytest.mark.parametrize("wrong", [0, -1])
def test_numbers_of_bytes_that_cannot_be_are_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match="budget_bytes"):
        PinnedPool(wrong)
    with pytest.raises(ConfigError, match="slab_bytes"):
        PinnedPool(slab_bytes=wrong)
    with pytest.raises(ConfigError, match="-1 bytes"):
        PinnedPool().allocate(-1)


def test_trim_gives_back_the_slabs_that_hold_nothing(pool: PinnedPool) -> None:
    first, second = pool.allocate(SLAB), pool.allocate(SLAB)
    first.release()
    assert pool.trim() == SLAB
    assert pool.stats().reserved_bytes == SLAB
    second.release()
    assert pool.trim() == SLAB
    assert pool.trim() == 0


def test_a_closed_pool_hands_out_nothing_and_its_buffers_live_on(pool: PinnedPool) -> None:
    held, returned = pool.allocate(100), pool.allocate(100)
    held.tensor.fill_(7)
    returned.release()
    pool.close()
    pool.close()
    with pytest.raises(HostMemoryError, match="closed"):
        pool.allocate(1)
    with pytest.raises(HostMemoryError, match="closed"):
        pool.allocate(0)
    assert bool((held.tensor == 7).all())
    held.release()
    assert pool.stats().in_use_bytes == pool.stats().reserved_bytes == 0


class PendingEvent(InlineEvent):
    """A copy that runs until the host waits for it. Inline events have always happened."""

    def __init__(self) -> None:
        super().__init__()
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def test_memory_comes_back_at_once_with_the_copies_that_still_use_it() -> None:  # SA-24
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    copies = [PendingEvent() for _ in range(3)]
    buffers = [pool.allocate(64) for _ in copies]
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.used_by(copy)
        buffer.release()
    assert pool.allocate(64).last_use == (copies[0],)
    wide = pool.allocate(128)  # the first is held no longer: it begins there
    assert wide.last_use == (copies[0], copies[1])
    assert pool.allocate(SLAB - 256).last_use == (copies[2],)
    assert not any(copy.happened for copy in copies)
    assert pool.stats().slabs == 1


def test_a_buffer_that_no_copy_used_hands_on_the_copies_before_it() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    copy = PendingEvent()
    first = pool.allocate(64)
    first.used_by(copy)
    first.release()
    pool.allocate(64).release()
    assert pool.allocate(64).last_use == (copy,)


def test_memory_whose_copies_have_ended_is_one_piece_again() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    copies = [PendingEvent() for _ in range(4)]
    buffers = [pool.allocate(SLAB // 4) for _ in copies]
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.used_by(copy)
        copy.synchronize()
        buffer.release()
    assert pool.allocate(SLAB).last_use == ()
    assert pool.stats().slabs == 1


def test_trim_waits_for_the_copies_of_what_it_gives_back() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    copy = PendingEvent()
    buffer = pool.allocate(64)
    buffer.used_by(copy)
    buffer.release()
    assert pool.trim() == SLAB
    assert copy.happened


def test_a_buffer_can_be_waited_for() -> None:
    copy = PendingEvent()
    buffer = PinnedPool(pin=False).allocate(64)
    buffer.wait()
    buffer.used_by(copy)
    buffer.wait()
    assert copy.happened


def test_threads_never_get_the_same_bytes() -> None:
    pool = PinnedPool(pin=False, slab_bytes=SLAB)
    wrong: list[str] = []

    def work(mark: int) -> None:
        for turn in range(200):
            buffers = [pool.allocate(64 * (1 + (turn + mark + i) % 7)) for i in range(4)]
            for buffer in buffers:
                buffer.tensor.fill_(mark)
            if not all(bool((buffer.tensor == mark).all()) for buffer in buffers):
                wrong.append(f"thread {mark}, turn {turn}")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.stats().in_use_bytes == 0


steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 3 * SLAB)),
        st.tuples(st.sampled_from(["release", "drop"]), st.integers(0, 30)),
        st.tuples(st.just("trim"), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(steps=steps, budget=st.one_of(st.none(), st.integers(1, 8 * SLAB)))
def test_any_history_agrees_with_a_list_of_ranges(
    steps: list[tuple[str, int]], budget: int | None
) -> None:
    pool = PinnedPool(budget, pin=False, slab_bytes=SLAB)
    held: list[HostBuffer] = []
    for action, number in steps:
        if action == "allocate":
            try:
                held.append(pool.allocate(number))
            except BudgetExceededError:
                assert budget is not None
                assert pool.stats().reserved_bytes + -(-number // 64) * 64 > budget
        elif action == "trim":
            pool.trim()
        elif held:
            buffer = held.pop(number % len(held))
            if action == "release":
                buffer.release()
            del buffer
        stats = pool.stats()
        assert stats.in_use_bytes == sum(-(-b.tensor.numel() // 64) * 64 for b in held)
        assert stats.in_use_bytes <= stats.reserved_bytes <= (budget or stats.reserved_bytes)
        ranges = sorted((span(b) for b in held if span(b)), key=lambda r: r.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    held.clear()
    pool.stats()
    whole = [[(0, slab.memory.numel())] for slab in pool._slabs]
    assert [[(p.start, p.stop) for p in slab.pieces] for slab in pool._slabs] == whole
    assert pool.trim() == sum(size for [(_, size)] in whole)
    assert pool.stats().reserved_bytes == 0
