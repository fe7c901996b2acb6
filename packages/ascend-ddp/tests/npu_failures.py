"""What the ranks of test_failures_npu.py do: one of them ends, or never comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ascend_ddp import DDPConfig, reduce_gradients

VICTIM = 1
TIMEOUT_S = 2.0
AWAY_S = 20.0  # how long who does not come is elsewhere: a busy machine has noticed by then


def dies_between_steps(rank: int, world: int) -> dict[str, Any]:
    """The victim ends before its second backward."""
    return survive(rank, lambda model: os._exit(3))


def dies_in_backward(rank: int, world: int) -> dict[str, Any]:
    """The victim ends with half of its buckets sent."""

    def die(model: nn.Sequential) -> None:
        def end(grad: Tensor) -> None:
            os._exit(3)

        model[1].weight.register_hook(end)
        step(model)

    return survive(rank, die)


def never_comes(rank: int, world: int) -> dict[str, Any]:
    """The victim goes on, elsewhere."""
    return survive(rank, lambda model: time.sleep(AWAY_S))


def step(model: nn.Module) -> None:
    model(torch.ones(4, 16, device="npu")).sum().backward()


def survive(rank: int, end: Callable[[nn.Sequential], None]) -> dict[str, Any]:
    """Take steps until an error comes: what it says, where it came from, and after how long."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to("npu")
    handle = reduce_gradients(model, DDPConfig(bucket_bytes=800, timeout_s=TIMEOUT_S))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    torch.npu.synchronize()
    if rank == VICTIM:
        end(model)
        return {}
    began, place, taken = time.monotonic(), "", 0
    try:
        for _ in range(3):
            place = "backward"
            optimizer.zero_grad()
            step(model)
            place = "step"
            optimizer.step()
            taken += 1
        place = "synchronize"
        torch.npu.synchronize()
    except Exception as error:
        took = time.monotonic() - began
        return {
            "type": type(error).__name__,
            "text": str(error),
            "place": place,
            "steps": taken,
            "took": took,
            "gradients": sum(p.grad is not None for p in model.parameters()),
            "buckets": handle.report()["buckets"],
        }
    return {"type": "none"}
