"""Ten kinds of race, each with its synchronisation and without it.

In `lazy` or in `early` a program that lacks the synchronisation is wrong on every run, in `random`
on some; `eager` hides every race.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ascend_sim import Simulator

N = 1 << 14
RUNS = 10

Race = Callable[[bool], bool]


def zeros() -> torch.Tensor:
    return torch.zeros(N, device="npu")


def pinned(value: float) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


def offload_before_the_producer(synchronised: bool) -> bool:
    """D2H on a side stream, of what the compute stream still computes."""
    side, host = torch.npu.Stream(), torch.full((N,), -1.0, pin_memory=True)
    x = torch.zeros(N, device="npu")
    torch.npu.synchronize()
    x.add_(1).mul_(2)
    if synchronised:
        side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        host.copy_(x, non_blocking=True)
    side.synchronize()
    return bool(host.eq(2).all())


def consumer_before_the_prefetch(synchronised: bool) -> bool:
    """H2D on a side stream, of what the compute stream reads."""
    side, host = torch.npu.Stream(), torch.full((N,), 3.0).pin_memory()
    x = torch.zeros(N, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        x.copy_(host, non_blocking=True)
    if synchronised:
        torch.npu.current_stream().wait_stream(side)
    doubled = x * 2
    return bool(doubled.cpu().eq(6).all())


def free_before_the_side_stream(synchronised: bool) -> bool:
    """A block is freed, and taken by another tensor, while a side stream is to copy it."""
    side, host = torch.npu.Stream(), torch.empty(N, pin_memory=True)
    x = torch.full((N,), 7.0, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        host.copy_(x, non_blocking=True)
    if synchronised:
        x.record_stream(side)
    del x
    other = torch.full((N,), 9.0, device="npu")
    torch.npu.current_stream().synchronize()
    side.synchronize()
    del other
    return bool(host.eq(7).all())


def host_before_the_copy(synchronised: bool) -> bool:
    """The host reads pinned memory into which a copy is on its way."""
    host, x = torch.zeros(N, pin_memory=True), torch.full((N,), 4.0, device="npu")
    torch.npu.synchronize()
    host.copy_(x, non_blocking=True)
    if synchronised:
        torch.npu.current_stream().synchronize()
    return bool(host.eq(4).all())


def reload_before_the_offload(synchronised: bool) -> bool:
    """H2D on a side stream, of what another side stream still brings to the host."""
    main, offload, reload = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
    x, y, host = zeros(), zeros(), torch.full((N,), -1.0, pin_memory=True)
    torch.npu.synchronize()
    x.add_(2)
    offload.wait_stream(main)
    with torch.npu.stream(offload):
        host.copy_(x, non_blocking=True)
    if synchronised:
        reload.wait_stream(offload)
    with torch.npu.stream(reload):
        y.copy_(host, non_blocking=True)
    main.wait_stream(reload)
    return bool(y.cpu().eq(2).all())


def reload_in_place_before_the_offload(synchronised: bool) -> bool:
    """The same on the compute stream: the inline path, which megatron-core forgets."""
    main, offload = torch.npu.current_stream(), torch.npu.Stream()
    x, y, host = zeros(), zeros(), torch.full((N,), -1.0, pin_memory=True)
    torch.npu.synchronize()
    x.add_(2)
    offload.wait_stream(main)
    with torch.npu.stream(offload):
        host.copy_(x, non_blocking=True)
    if synchronised:
        main.wait_stream(offload)
    y.copy_(host, non_blocking=True)
    return bool(y.cpu().eq(2).all())


def prefetch_over_a_buffer_in_use(synchronised: bool) -> bool:
    """H2D on a side stream, into what the compute stream still reads."""
    main, side, host = torch.npu.current_stream(), torch.npu.Stream(), pinned(3.0)
    x = zeros().add_(1)
    torch.npu.synchronize()
    before = x * 2
    if synchronised:
        side.wait_stream(main)
    with torch.npu.stream(side):
        x.copy_(host, non_blocking=True)
    main.wait_stream(side)
    after = x * 2
    return bool(before.cpu().eq(2).all()) and bool(after.cpu().eq(6).all())


def prefetch_into_a_recycled_block(synchronised: bool) -> bool:
    """The same by way of the allocator: a block of the side stream's own is free for it at once."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    first, second = pinned(1.0), pinned(3.0)
    torch.npu.synchronize()
    with torch.npu.stream(side):
        x = first.to("npu", non_blocking=True)
    main.wait_stream(side)
    before = x * 2
    del x
    if synchronised:
        side.wait_stream(main)
    with torch.npu.stream(side):
        x = second.to("npu", non_blocking=True)
    main.wait_stream(side)
    after = x * 2
    return bool(before.cpu().eq(2).all()) and bool(after.cpu().eq(6).all())


def step_before_the_gradients_are_reduced(synchronised: bool) -> bool:
    """A kernel of a side stream, in place of a reduce-scatter, and an optimizer that is early."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    weight, gradient = zeros(), zeros()
    torch.npu.synchronize()
    gradient.add_(8)
    side.wait_stream(main)
    with torch.npu.stream(side):
        gradient.div_(2)
    if synchronised:
        main.wait_stream(side)
    weight.sub_(gradient)
    return bool(weight.cpu().eq(-4).all())


def forward_before_the_weights_are_gathered(synchronised: bool) -> bool:
    """A kernel of a side stream, in place of an all-gather, and a forward pass that is early."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    weight, shard = zeros(), zeros()
    torch.npu.synchronize()
    shard.add_(5)
    side.wait_stream(main)
    with torch.npu.stream(side):
        weight.copy_(shard)
    if synchronised:
        main.wait_stream(side)
    output = weight * 2
    return bool(output.cpu().eq(10).all())


RACES = [
    offload_before_the_producer,
    consumer_before_the_prefetch,
    free_before_the_side_stream,
    host_before_the_copy,
    reload_before_the_offload,
    reload_in_place_before_the_offload,
    prefetch_over_a_buffer_in_use,
    prefetch_into_a_recycled_block,
    step_before_the_gradients_are_reduced,
    forward_before_the_weights_are_gathered,
]


# A side stream that is too early: `lazy` runs its task only when the compute stream needs it.
LAZY_MISSES = [prefetch_over_a_buffer_in_use, prefetch_into_a_recycled_block]

# A side stream that is too late: `early` runs its task at once.
EARLY_MISSES = [
    consumer_before_the_prefetch,
    free_before_the_side_stream,
    reload_in_place_before_the_offload,
    step_before_the_gradients_are_reduced,
    forward_before_the_weights_are_gathered,
]


def times_right(race: Race, synchronised: bool) -> int:
    right = 0
    for _ in range(RUNS):
        right += race(synchronised)
        torch.npu.synchronize()
    return right


def found_unless(missed: list[Race]) -> list[Race]:
    return [race for race in RACES if race not in missed]


@pytest.mark.parametrize("race", RACES)
def test_with_its_synchronisation_a_program_is_right(race: Race) -> None:
    assert times_right(race, synchronised=True) == RUNS


@pytest.mark.schedules("lazy")
@pytest.mark.parametrize("race", found_unless(LAZY_MISSES))
def test_without_it_lazy_is_wrong_every_time(race: Race) -> None:
    assert times_right(race, synchronised=False) == 0


@pytest.mark.schedules("early")
@pytest.mark.parametrize("race", found_unless(EARLY_MISSES))
def test_without_it_early_is_wrong_every_time(race: Race) -> None:
    assert times_right(race, synchronised=False) == 0


@pytest.mark.schedules("random")
@pytest.mark.parametrize("race", RACES)
def test_without_it_random_is_wrong_now_and_then(race: Race) -> None:
    assert times_right(race, synchronised=False) < RUNS


@pytest.mark.schedules("lazy")
@pytest.mark.parametrize("race", LAZY_MISSES)
def test_without_it_lazy_may_be_right_which_is_why_there_is_early(race: Race) -> None:
    assert race not in EARLY_MISSES
    assert times_right(race, synchronised=False) == RUNS


@pytest.mark.schedules("eager")
@pytest.mark.parametrize("race", RACES)
def test_without_it_eager_is_right_so_that_it_proves_nothing(race: Race) -> None:
    assert times_right(race, synchronised=False) == RUNS


@pytest.mark.schedules("random")
def test_a_seed_repeats_its_choices(npu_sim: Simulator) -> None:
    def outcomes() -> list[bool]:
        torch.npu.synchronize()
        npu_sim.reseed()
        found = []
        for _ in range(4 * RUNS):
            found.append(consumer_before_the_prefetch(synchronised=False))
            torch.npu.synchronize()
        return found

    first = outcomes()
    assert len(set(first)) == 2  # else there was no choice to repeat
    assert outcomes() == first
