"""The sharded optimizer with its parts on the host, or with masters in the bits of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core import windowed
from ascend_core.testing import bitwise_equal, run_ranks
from ascend_ddp import DDPConfig, reduce_gradients, shard_optimizer
from ascend_reuse_param import ReuseParamConfig, reuse_param
from ascend_swap import SwapOptimizerConfig, swap_optimizer

RANKS, STEPS = 2, 6
IN, HIDDEN = 61, 257

Wrap = Callable[[optim.Optimizer], Any]


def masters(optimizer: optim.Optimizer) -> Any:
    return windowed(optimizer, master_weights=True)


def on_host(optimizer: optim.Optimizer) -> Any:
    return swap_optimizer(
        optimizer, SwapOptimizerConfig(swap_optimizer_times=3, master_weights=True)
    )


def with_gradients(optimizer: optim.Optimizer) -> Any:
    """Gradients of parts come from no backward, so that none moves ahead of the step."""
    return swap_optimizer(
        optimizer,
        SwapOptimizerConfig(swap_optimizer_times=3, master_weights=True, offload_gradients=True),
    )


def released(optimizer: optim.Optimizer) -> Any:
    return swap_optimizer(
        optimizer,
        SwapOptimizerConfig(swap_optimizer_times=3, master_weights=True, release_grads=True),
    )


def reused(optimizer: optim.Optimizer) -> Any:
    return reuse_param(optimizer, ReuseParamConfig(times=3))


WRAPS: dict[str, Wrap] = {
    "masters": masters,
    "on the host": on_host,
    "gradients on the host": with_gradients,
    "released": released,
    "reused": reused,
}
FORMS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3))
    return nn.Sequential(*layers).bfloat16()


def batch(rank: int, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, IN, generator=seeded).bfloat16()


def train(of: nn.Module, optimizer: optim.Optimizer, rank: int, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = of(batch(rank, step)).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compared(rank: int, wrap: Wrap, options: dict[str, Any]) -> dict[str, Any]:
    """Train sharded, and whole with masters beside; stop half-way and go on from a checkpoint."""
    half = STEPS // 2
    theirs = model()
    reduce_gradients(theirs, DDPConfig(bucket_bytes=1 << 15))
    plain = masters(optim.AdamW(theirs.parameters(), lr=1e-2, **options))
    wanted = train(theirs, plain, rank, range(STEPS))

    found, saved, weights = [], None, None
    for steps in (range(half), range(half, STEPS)):
        ours = model()
        if weights is not None:
            ours.load_state_dict(weights)
        reduction = reduce_gradients(ours, DDPConfig(bucket_bytes=1 << 15, mode="reduce-scatter"))
        optimizer = shard_optimizer(
            optim.AdamW(ours.parameters(), lr=1e-2, **options), reduction, wrap=wrap
        )
        if saved is not None:
            optimizer.load_state_dict(saved)
        found += train(ours, optimizer, rank, steps)
        weights = {key: value.clone() for key, value in ours.state_dict().items()}
        saved = optimizer.state_dict()
    assert saved is not None
    expected = plain.state_dict()["state"]
    return {
        "losses": all(map(torch.equal, found, wanted)),
        "weights": all(map(bitwise_equal, weights.values(), theirs.state_dict().values())),
        "state": all(
            torch.equal(saved["state"][number][key], value)
            for number, kept in expected.items()
            for key, value in kept.items()
        ),
        "keys": {n: set(kept) for n, kept in saved["state"].items()}
        == {n: set(kept) for n, kept in expected.items()},
        "report": dict(optimizer.report()),
    }


def compared_all(rank: int) -> dict[str, dict[str, Any]]:
    """Every pair, in one start of the ranks."""
    return {
        f"{name}, {form}": compared(rank, wrap, options)
        for name, wrap in WRAPS.items()
        for form, options in FORMS.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(compared_all, RANKS, timeout_s=500)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRAPS)
def test_parts_train_as_the_whole_with_masters_beside(
    name: str, form: str, ranks: list[dict[str, dict[str, Any]]]
) -> None:
    for rank in ranks:
        found = rank[f"{name}, {form}"]
        assert {key: found[key] for key in ("losses", "weights", "state", "keys")} == {
            "losses": True, "weights": True, "state": True, "keys": True
        }  # fmt: skip


def test_each_rank_keeps_its_part(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Moments: 8 bytes for each element that is owned; residuals of reused ones: 2."""
    numel = sum(p.numel() for p in model().parameters())
    reports = [rank["reused, fused"]["report"] for rank in ranks]
    assert sum(report["own_elements"] for report in reports) == numel
    for report in reports:
        assert report["inner"]["moment_bytes"] == 8 * report["own_elements"]
        assert report["inner"]["residual_bytes"] == 2 * report["own_elements"]
        assert abs(report["own_elements"] - numel / RANKS) < 64 * 10
