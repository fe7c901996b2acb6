"""Gradients are averaged over ranks as torch's DistributedDataParallel does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ascend_core.testing import run_ranks
from ascend_ddp import DDPConfig, reduce_gradients

STEPS = 10


class Model(nn.Module):
    """Four layers, of which the last shares its weight with the first."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.last(x)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: nn.Module, called: nn.Module, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = called(batch(rank, step)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return losses + grads, [p.detach().clone() for p in model.parameters()]


def equals_torch(rank: int, config: DDPConfig) -> bool:
    theirs, ours = Model(), Model()
    expected = train(theirs, DistributedDataParallel(theirs), rank)
    handle = reduce_gradients(ours, config)
    found = train(ours, ours, rank)
    report = handle.report()
    assert report["collectives"] == report["backwards"] * report["buckets"]
    assert report["backwards"] == STEPS
    return all(map(torch.equal, expected[0], found[0])) and all(
        map(torch.equal, expected[1], found[1])
    )


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 25 << 20])
@pytest.mark.parametrize("overlap", [True, False])
def test_equals_torchs_ddp(bucket_bytes: int, overlap: bool) -> None:
    config = DDPConfig(bucket_bytes=bucket_bytes, overlap=overlap)
    assert run_ranks(equals_torch, 2, config) == [True, True]
