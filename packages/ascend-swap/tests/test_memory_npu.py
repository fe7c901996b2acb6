"""What a step holds on the simulated NPU, to the byte, from the shapes alone."""

from __future__ import annotations

import gc
import io
from typing import Any

import pytest
import torch
from torch import nn, optim

import ascend_sim
from ascend_swap import SwapOptimizerConfig, swap_optimizer

pytestmark = pytest.mark.skipif(
    ascend_sim.current() is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

exact = pytest.mark.skipif(
    getattr(ascend_sim.current(), "config", None) is None
    or ascend_sim.current().config.schedule not in ("eager", "timed"),
    reason="memory is exact under --npu-sim=eager and timed: elsewhere blocks wait for streams",
)

SIZES = (1, 7, 4097, 100_003)
GRID, ALIGNMENT, PADDING = 64, 512, 32


def up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def block(nbytes: int) -> int:
    """What torch_npu's allocator takes for a tensor."""
    return up(nbytes + PADDING, ALIGNMENT)


def active() -> int:
    torch.npu.synchronize()
    gc.collect()
    torch.npu.empty_cache()  # which looks for blocks whose streams have come to their end
    return torch.npu.memory_stats()["active_bytes.all.current"]


@exact
@pytest.mark.parametrize("times", [1, 3, 16])
def test_between_steps_there_are_weights_and_nothing_else(times: int, training: Any) -> None:
    before = active()
    trained = training(SIZES, times, fused=True)
    trained.train(2)
    weights = sum(block(4 * numel) for numel in SIZES)
    gradients = 2 * weights  # which `Training` holds ready
    assert active() - before == weights + gradients


@exact
def test_masters_and_checkpoints_take_no_byte_of_the_device() -> None:  # SO-25
    weights = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="npu")) for n in SIZES]
    before = active()
    torch.npu.reset_peak_memory_stats()
    optimizer = swap_optimizer(
        optim.AdamW(weights, fused=True), SwapOptimizerConfig(master_weights=True)
    )
    assert torch.npu.memory_stats()["active_bytes.all.peak"] == before
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    assert active() == before
    file = io.BytesIO()
    torch.npu.reset_peak_memory_stats()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert torch.npu.memory_stats()["active_bytes.all.peak"] == before
    assert optimizer.state[weights[3]]["master_param"].dtype == torch.float32


def slices(times: int) -> list[list[int]]:
    """The lengths of the slices of each window, cut anew from what the documentation says."""
    size = up(-(-sum(SIZES) // times), GRID)
    windows: list[list[int]] = [[]]
    room = size
    for numel in SIZES:
        left = numel
        while left > room:
            taken = room // GRID * GRID
            windows[-1] += [taken] if taken else []
            windows.append([])
            left, room = left - taken, size
        windows[-1].append(left)
        room -= left
    return windows


def peak_of_a_step(times: int) -> int:
    """Three windows of both moments and step counts, and scratch for a gradient and a weight."""
    windows = slices(times)
    # A slice of an array begins on the grid, so that a window spans whole units of it.
    spans = [up(sum(up(n, GRID) for n in w[:-1]) + w[-1], 1) for w in windows]
    ring = max(
        2 * up(4 * span, ALIGNMENT) + up(4 * len(w), ALIGNMENT)
        for span, w in zip(spans, windows, strict=True)
    )
    scratch = max(sum(2 * up(4 * n, ALIGNMENT) for n in window) for window in windows)
    return min(3, len(windows)) * block(ring) + block(scratch)


@exact
@pytest.mark.parametrize("times", [1, 2, 3, 16])
def test_a_step_takes_three_windows_and_scratch(times: int, training: Any) -> None:
    trained = training(SIZES, times, fused=True)
    trained.train(1)
    trained.backward(1)
    before = active()
    torch.npu.reset_peak_memory_stats()
    trained.optimizer.step()
    torch.npu.synchronize()
    peak = torch.npu.memory_stats()["active_bytes.all.peak"] - before
    assert peak == peak_of_a_step(times)


def test_a_device_of_the_predicted_peak_holds_it_and_not_plain_adamw(
    training: Any, free: Any
) -> None:
    numel = 3 * 2**20 - 1024
    window = numel // 2
    # Every block has a segment of its own: more than 10 MiB, and just short of a whole 2 MiB.
    in_use = 2 * 4 * block(4 * numel)  # weights and gradients
    predicted = in_use + 3 * block(2 * 4 * window + ALIGNMENT) + block(2 * 4 * window)
    outcomes = []
    for times in (8, None):
        trained = training([numel] * 4, times, fused=True, held_gradients=1)
        trained.use_gradients(0)
        with free(int(1.05 * predicted) - in_use):
            try:
                trained.optimizer.step()
                outcomes.append("fits")
            except torch.OutOfMemoryError:
                outcomes.append("out of memory")
        del trained
    assert outcomes == ["fits", "out of memory"]


def test_nothing_grows(training: Any, npu_sim: Any) -> None:
    trained = training(SIZES, 16, fused=True)
    trained.train(3)
    gc.disable()
    try:
        before = held(npu_sim)
        objects = len(gc.get_objects())
        for number in range(3, 33):
            trained.step(number)
        objects = len(gc.get_objects()) - objects
        after = held(npu_sim)
    finally:
        gc.enable()
    assert after == before
    assert objects < 30  # not one for each step


def held(simulator: Any) -> tuple[int, int]:
    """Active bytes of the device, and pinned bytes of the host."""
    return active(), simulator.counters().pinned_bytes
