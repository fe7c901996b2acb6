"""What is held between steps, and in one, to the byte, from the shapes alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.memory import measure_peak
from ascend_core.optim import windowed
from ascend_reuse_param import ReuseParamConfig, reuse_param

BLOCK = 4096
NUMELS = (1, 7, 4097, 100_003)


def test_static_bytes_on_the_cpu_equal_the_arithmetic() -> None:
    """2 (weight) + 2 (residual) + 8 (moments), 8 per block and what the few exceptions take."""
    with measure_peak("cpu") as memory:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(n).bfloat16()) for n in NUMELS]
        optimizer = reuse_param(optim.AdamW(weights), ReuseParamConfig(times=1))
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).bfloat16()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    held = memory.held_bytes
    total = sum(NUMELS)
    report = optimizer.report()
    blocks = sum(-(-n // BLOCK) for n in NUMELS)
    steps = 4 * len(NUMELS)
    assert report["residual_bytes"] == 2 * total
    assert report["moment_bytes"] == 8 * total
    assert report["fingerprint_bytes"] == 8 * blocks
    assert report["exception_bytes"] < total // 1000
    assert report["windows_with_a_bitmap"] == 0
    wanted = 12 * total + 8 * blocks + report["exception_bytes"] + steps
    assert held - wanted in range(8192)  # and the tables of the fingerprint


def held_bytes(wrap: Any) -> int:
    with measure_peak("cpu") as memory:
        weight = nn.Parameter(torch.ones(1_000_000, dtype=torch.bfloat16))
        optimizer = wrap(optim.AdamW([weight]))
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
    assert optimizer.report()["parameters"] == 1
    return memory.held_bytes


def test_against_masters_beside_the_weights_two_bytes_fall_away() -> None:
    beside = held_bytes(lambda inner: windowed(inner, master_weights=True))
    assert beside == 14 * 1_000_000 + 4
    # Fingerprints take 0.1 % of what falls away.
    assert beside - held_bytes(reuse_param) == pytest.approx(2_000_000, rel=0.005)


@pytest.mark.parametrize(("low", "expected"), [(0x8000, "bitmap"), (0x1234, "nothing")])
def test_exceptions_are_kept_as_what_is_smaller(low: int, expected: str, run: Any) -> None:
    numel = 64 * 1024
    tops = (torch.arange(numel) % 100 + 0x3F00) << 16
    trained = run("reuse", [(numel,)], config=ReuseParamConfig(times=4)).train(1)
    checkpoint = trained.optimizer.state_dict()
    checkpoint["state"][0]["master_param"] = (tops | low).int().view(torch.float32)
    trained.optimizer.load_state_dict(checkpoint)
    report = trained.optimizer.report()
    assert report["exception_bytes"] == (numel // 8 if expected == "bitmap" else 0)
    assert report["windows_with_a_bitmap"] == (4 if expected == "bitmap" else 0)


def test_a_few_exceptions_are_a_list(run: Any) -> None:
    numel = 64 * 1024
    masters = torch.full((numel,), 0x3F810000, dtype=torch.int32)
    masters[[5, 6, 40_000]] = 0x3F818000  # odd, and a tie
    trained = run("reuse", [(numel,)], config=ReuseParamConfig(times=1)).train(1)
    checkpoint = trained.optimizer.state_dict()
    checkpoint["state"][0]["master_param"] = masters.view(torch.float32)
    trained.optimizer.load_state_dict(checkpoint)
    assert trained.optimizer.report()["exception_bytes"] == 2 * 8  # two of them share a word
    trained.weights[0].data.copy_(masters.view(torch.float32))
    assert torch.equal(trained.masters()[0].view(torch.int32), masters)


@pytest.mark.parametrize("numel", [1, 8, 9, 63, 65 * 8 + 1])
def test_a_bitmap_may_end_inside_a_word(numel: int, run: Any) -> None:
    masters = torch.full((numel,), 0x3F818000, dtype=torch.int32)  # odd, and a tie, all of them
    trained = run("reuse", [(numel,), (numel,)], config=ReuseParamConfig(times=1)).train(1)
    checkpoint = trained.optimizer.state_dict()
    for state in checkpoint["state"].values():
        state["master_param"] = masters.view(torch.float32)
    for _ in range(2):
        trained.optimizer.load_state_dict(checkpoint)
        for weight in trained.weights:
            weight.data.copy_(masters.view(torch.float32))
        for master in trained.masters():
            assert torch.equal(master.view(torch.int32), masters)


@pytest.mark.parametrize(
    ("kernels", "fused", "windows"), [("eager", False, 16), ("auto", False, 4), ("auto", True, 16)]
)
def test_windows_are_few_where_no_masters_are_joined(
    kernels: str, fused: bool, windows: int
) -> None:
    weight = nn.Parameter(torch.ones(1 << 17, dtype=torch.bfloat16))
    inner = optim.AdamW([weight], fused=fused)
    optimizer = reuse_param(inner, ReuseParamConfig(kernels=kernels))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.report()["windows"] == windows
