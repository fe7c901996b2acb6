"""What `state` shows is live: it can be written to, and outlives the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core import PinnedPool, windowed
from ascend_core.testing import available_devices, bitwise_equal
from ascend_swap import SwapOptimizerConfig, swap_optimizer


@pytest.fixture(params=available_devices(), ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


def train(optimizer: optim.Optimizer, params: list[nn.Parameter], *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape).to(parameter.device)
        optimizer.step()


def parameters(device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(device)) for size in (1000, 7, 4097)]


def test_views_stay_what_they_were_after_remove(device: torch.device) -> None:
    pool = PinnedPool()
    params = parameters(device)
    optimizer = swap_optimizer(optim.AdamW(params), pool=pool)
    train(optimizer, params, 0, 1)
    kept = optimizer.state[params[2]]["exp_avg"][5:]
    before = kept.clone()
    optimizer.remove()
    held = pool.stats().in_use_bytes
    assert held == 4 * 5248  # one array of moments, of which the view is a part
    taken = [pool.allocate(size) for size in (4, 100, 20_000, 20_000, 40_000)]
    for buffer in taken:
        buffer.tensor.fill_(7)
    assert bitwise_equal(kept, before)
    del kept
    assert pool.stats().in_use_bytes == sum(-(-b.tensor.numel() // 64) * 64 for b in taken)


def test_views_stay_what_they_were_when_room_is_made_anew() -> None:
    pool = PinnedPool()
    params, others = parameters(torch.device("cpu")), parameters(torch.device("cpu"))
    amsgrad = optim.AdamW(others, amsgrad=True)
    train(amsgrad, others, 0)
    optimizer = swap_optimizer(optim.AdamW(params), pool=pool)
    train(optimizer, params, 0)
    kept = optimizer.state[params[0]]["exp_avg"]
    before = kept.clone()
    optimizer.load_state_dict(amsgrad.state_dict())
    pool.allocate(20_000).tensor.fill_(7)
    assert bitwise_equal(kept, before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("home", ["resident", "host"])
def test_a_step_count_that_is_written_counts_for_every_slice(
    home: str, fused: bool, device: torch.device
) -> None:
    def run(wrap: Any) -> list[nn.Parameter]:
        params = parameters(device)
        optimizer = wrap(optim.AdamW(params, lr=1e-2, fused=fused))
        train(optimizer, params, 0)
        held = optimizer.state[params[2]]["step"]
        train(optimizer, params, 1)
        optimizer.state[params[0]]["step"].fill_(9)  # (waits until the last step is on the host)
        held.zero_()
        train(optimizer, params, 2, 3)
        assert optimizer.state[params[2]]["step"] == held == 2
        return params

    def windows(plain: Any) -> Any:
        if home == "resident":
            return windowed(plain, times=5)
        return swap_optimizer(plain, SwapOptimizerConfig(swap_optimizer_times=5))

    assert all(map(bitwise_equal, run(lambda plain: plain), run(windows)))


def test_reading_the_state_makes_no_step_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(torch.device("cpu"))
    optimizer: Any = swap_optimizer(optim.AdamW(params), SwapOptimizerConfig(5))
    train(optimizer, params, 0)
    held = optimizer.state
    waits: list[int] = []
    monkeypatch.setattr(optimizer._home, "settle", lambda: waits.append(1))
    train(optimizer, params, 1, 2)
    assert waits == []
    assert held[params[2]]["step"] == 3
