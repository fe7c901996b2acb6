"""What training with swapped attention holds on the simulated NPU, from the shapes alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ascend_sim
from ascend_core.pinned import PinnedPool
from ascend_swap import SwapAttentionConfig, swap_attention

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None, reason="there is no simulated NPU: run pytest with --npu-sim"
)

exact = pytest.mark.skipif(
    running is None or running.config.schedule not in ("eager", "timed"),
    reason="memory is exact under --npu-sim=eager and timed: elsewhere blocks wait for streams",
)

B, S, D, N = 2, 64, 64, 4
ALIGNMENT, PADDING = 512, 32
HIDDEN = 4 * B * S * D  # bytes of x_BSD


def block(nbytes: int) -> int:
    """What torch_npu's allocator takes for a tensor."""
    return -(-(nbytes + PADDING) // ALIGNMENT) * ALIGNMENT


# What a layer saves that moves: the inputs of both norms and of both linear layers, and what
# attention mixed; queries, keys and values in one; means and scales of the norms; and attention's
# maxima and sums, 8 numbers for each query.
MOVED = 5 * block(HIDDEN) + block(3 * HIDDEN) + 4 * block(4 * B * S) + 2 * block(4 * 8 * B * N * S)
# What it saves in its MLP: the input, and what GELU is given and makes.
STAYING = block(HIDDEN) + 2 * block(2 * HIDDEN)


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What other tests left is gone; what is measured here leaves none."""
    gc.collect()


def active() -> int:
    torch.npu.synchronize()
    torch.npu.empty_cache()  # which looks for blocks whose streams have come to their end
    return torch.npu.memory_stats()["active_bytes.all.current"]


class Measured:
    """The second step of a training.

    Args:
        decoder: The class of the model.
        layers: How many it has.
        options: Of the feature; the plain run when there are none.

    Attributes:
        held: Device bytes between forward and backward, beyond those before forward.
        peak: The most of the step, beyond those before it.
        left: Those after backward, without the gradients.
    """

    def __init__(self, decoder: Any, layers: int, **options: Any) -> None:
        model, x = decoder(layers, D, N).to("npu"), torch.randn(B, S, D).npu()
        if options:
            swap_attention(model, SwapAttentionConfig(min_bytes=1, **options))
        model(x).square().mean().backward()
        clear(model)
        before = active()
        torch.npu.reset_peak_memory_stats()
        loss = model(x).square().mean()
        self.held = active() - before
        loss.backward()
        del loss
        torch.npu.synchronize()
        self.peak = torch.npu.memory_stats()["active_bytes.all.peak"] - before
        clear(model)
        self.left = active() - before


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@exact
def test_what_is_held_is_what_does_not_move(decoder: Any) -> None:
    plain = [Measured(decoder, layers) for layers in (4, 8)]
    swapped = [Measured(decoder, layers, keep_last=0) for layers in (4, 8)]
    assert (plain[1].held - plain[0].held) == 4 * (MOVED + STAYING)
    assert (swapped[1].held - swapped[0].held) == 4 * STAYING
    for without, moving, layers in zip(plain, swapped, (4, 8), strict=True):
        assert without.held - moving.held == layers * MOVED
        assert moving.peak <= without.peak - layers * MOVED + 2 * MOVED
        assert moving.left == without.left == 0


@exact
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_peak_grows_with_what_is_fetched_ahead(prefetch: int, decoder: Any) -> None:
    one = Measured(decoder, 4, keep_last=0)
    other = Measured(decoder, 4, keep_last=0, prefetch=prefetch)
    assert other.held == one.held
    assert other.peak - one.peak == (prefetch - 1) * MOVED


@exact
def test_layers_that_stay_are_held_whole(decoder: Any) -> None:
    kept = [Measured(decoder, 4, keep_last=count).held for count in (0, 1, 2)]
    assert [held - kept[0] for held in kept] == [0, MOVED, 2 * MOVED]
    assert Measured(decoder, 4, keep_last=None).held == kept[1]  # it found out: the last one


@exact
def test_with_recomputed_mlps_no_layer_holds_anything(decoder: Any) -> None:
    held = [
        Measured(decoder, layers, keep_last=0, recompute_num_layers=layers).held
        for layers in (4, 8)
    ]
    assert held[0] == held[1]


class Layer(nn.Module):
    """Saves what it is given and what it makes of it, and all of that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.self_attention(x)
        return x + mixed


def test_a_device_of_the_predicted_peak_holds_it_and_not_the_plain_run(free: Any) -> None:
    layers, rows = 8, 3 * 2**17 - 64  # a tensor has a segment of its own, just short of 12 MiB
    tensor = block(4 * 8 * rows)
    # Plain: what each layer saves, and at the end of forward its output, once more for the square,
    # and two gradients. Two layers of those that move are on the device at a time.
    plain = (2 * layers + 4) * tensor
    predicted = plain - 2 * layers * tensor + 2 * 2 * tensor
    outcomes = []
    for options in ({"keep_last": 0}, None):
        model = nn.Sequential(*(Layer() for _ in range(layers))).to("npu")
        if options is not None:
            swap_attention(model, SwapAttentionConfig(**options))
        x = torch.ones(rows, 8, device="npu")
        with free(int(1.05 * predicted)):
            try:
                model(x).square().mean().backward()
                outcomes.append("fits")
            except torch.OutOfMemoryError:
                outcomes.append("out of memory")
        del model, x
    assert outcomes == ["fits", "out of memory"]


def test_nothing_grows(decoder: Any, npu_sim: Any) -> None:  # SA-24
    pool = PinnedPool()
    model, x = decoder(3, D, N).to("npu"), torch.randn(B, S, D).npu()
    swap_attention(model, SwapAttentionConfig(min_bytes=1, keep_last=0), pool=pool)

    def step() -> None:
        model(x).square().mean().backward()
        clear(model)
        torch.npu.synchronize()  # so that the times of its waits are read in the next one

    def held() -> tuple[int, int, int, int]:
        stats = pool.stats()
        pinned = npu_sim.counters().pinned_bytes
        return active(), pinned, stats.in_use_bytes, stats.peak_in_use_bytes

    for _ in range(3):
        step()
    gc.disable()
    try:
        before = held()
        step()
        objects = len(gc.get_objects())
        for _ in range(20):
            step()
        objects = len(gc.get_objects()) - objects
        after = held()
    finally:
        gc.enable()
    assert after == before
    assert before[2] == 0
    assert objects < 20  # not one for each step


def test_a_graph_that_is_dropped_holds_nothing(decoder: Any) -> None:
    pool = PinnedPool()
    model, x = decoder(3, D, N).to("npu"), torch.randn(B, S, D).npu()
    swap_attention(model, SwapAttentionConfig(min_bytes=1, keep_last=0), pool=pool)
    before = active()
    for _ in range(3):
        loss = model(x).square().mean()
        assert pool.stats().in_use_bytes > 0
        del loss
        assert pool.stats().in_use_bytes == 0  # at once: nothing waits for a collection
    assert active() == before


@pytest.mark.skipif(
    running is None or running.config.schedule != "lazy",
    reason="that nobody waited shows under --npu-sim=lazy, where nothing else lets a task run",
)
def test_the_host_waits_for_nothing(decoder: Any, npu_sim: Any) -> None:  # SA-17
    model, x = decoder(3, D, N).to("npu"), torch.randn(B, S, D).npu()
    swap_attention(model, SwapAttentionConfig(min_bytes=1))
    model(x).square().mean().backward()  # which pins the host memory
    before = npu_sim.counters()
    for _ in range(3):
        model(x).square().mean().backward()
    done = npu_sim.counters() - before
    assert done.synchronisations == 0
    assert done.tasks_pending > done.tasks_submitted > 0  # not even the first step has begun
    assert done.d2h_copies > 0
    assert done.h2d_copies > 0
