"""What is held on the simulated NPU, to the byte, from the shapes alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn, optim

import ascend_sim
from ascend_core.optim import windowed
from ascend_reuse_param import ReuseParamConfig, reuse_param

pytestmark = pytest.mark.skipif(
    getattr(ascend_sim.current(), "config", None) is None
    or ascend_sim.current().config.schedule not in ("eager", "timed"),
    reason="memory is exact under --npu-sim=eager and timed",
)

ALIGNMENT, PADDING, BLOCK = 512, 32, 4096
NUMELS = (7, 4097, 100_003)


def block(nbytes: int) -> int:
    """What torch_npu's allocator takes for a tensor."""
    return -(-(nbytes + PADDING) // ALIGNMENT) * ALIGNMENT


def active() -> int:
    torch.npu.synchronize()
    gc.collect()
    torch.npu.empty_cache()
    return torch.npu.memory_stats()["active_bytes.all.current"]


def step(weights: list[nn.Parameter], optimizer: Any) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def test_between_steps_there_are_two_bytes_instead_of_four() -> None:
    weights = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="npu")) for n in NUMELS]
    before = active()
    config = ReuseParamConfig(times=1)
    optimizer = reuse_param(optim.AdamW(weights, lr=0.0, fused=True), config)
    step(weights, optimizer)
    torch.npu.synchronize()
    assert optimizer.report()["exception_bytes"] == 0  # the masters are whole
    held = 0
    for numel in NUMELS:
        held += block(2 * numel) + 2 * block(4 * numel)  # residual and moments
        held += block(8 * -(-numel // BLOCK)) + block(4)  # fingerprints and step
    tables = block(64 * 4) + block(128 * 8)  # of the fingerprint
    assert active() - before == held + tables


def test_a_device_on_which_masters_beside_the_weights_do_not_fit(free: Any) -> None:
    """Static bytes + one window of scratch + 5 %: it fits, and FP32 masters run out of memory."""
    # Every large block has a segment of its own: just short of a whole number of 2 MiB.
    numel = 12 * 2**20 - 1024
    weights = [nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device="npu"))]
    gradient = torch.ones_like(weights[0])
    config = ReuseParamConfig(times=16)
    window = numel // 16
    scratch = (4 + 4 + 24) * window  # a master, a gradient in FP32, what the codec takes
    predicted = (2 + 8) * numel + numel // 8 + scratch
    outcomes = []
    for wrap in (
        lambda inner: windowed(inner, master_weights=True, times=16),
        lambda inner: reuse_param(inner, config),
    ):
        weights[0].grad = None  # so that there is no state before the step
        optimizer = wrap(optim.AdamW(weights, fused=True))
        weights[0].grad = gradient
        with free(int(1.05 * predicted)):
            try:
                optimizer.step()
                outcomes.append("fits")
            except torch.OutOfMemoryError:
                outcomes.append("out of memory")
        del optimizer
    assert outcomes == ["out of memory", "fits"]
