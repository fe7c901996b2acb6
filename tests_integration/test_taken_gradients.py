"""Two features that take gradients in backward refuse one another, without a plan too."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn, optim

from ascend_core.errors import ConfigError
from ascend_core.testing import run_ranks
from ascend_ddp import DDPConfig, reduce_gradients, shard_optimizer
from ascend_swap import SwapOptimizerConfig, swap_optimizer

OFFLOADING = SwapOptimizerConfig(offload_gradients=True)


def refused_in_either_order(rank: int) -> list[str]:
    """What each order is told; what was turned on first goes on as if nothing had been asked."""
    told = []
    for first in ("reduce", "swap"):
        model, optimizer = model_and_optimizer()
        reducing = functools.partial(reduce_gradients, model)
        offloading = functools.partial(swap_optimizer, optimizer, OFFLOADING)
        calls = (reducing, offloading) if first == "reduce" else (offloading, reducing)
        stepped = calls[0]()
        try:
            calls[1]()
        except ConfigError as error:
            told.append(str(error))
        for _ in range(2):
            model(torch.ones(2, 4) + rank).square().sum().backward()
            (optimizer if first == "reduce" else stepped).step()
        stepped.remove()
        calls[1]().remove()  # nothing is left of the first
    return told


def frozen_at_first(rank: int) -> str:
    """A parameter that is hooked later is looked at then."""
    model, optimizer = model_and_optimizer()
    model[1].requires_grad_(False)
    model[0].requires_grad_(False)
    model.append(nn.Linear(4, 4))
    offloading = swap_optimizer(optimizer, OFFLOADING)
    reduce_gradients(model)
    model[1].requires_grad_()
    offloading.zero_grad()
    offloading.step()
    try:
        model(torch.ones(2, 4)).sum().backward()
    except ConfigError as error:
        return str(error)
    return ""


def parts_may_be_offloaded(rank: int) -> str:
    """They are other parameters than those whose gradients are reduced."""
    model, optimizer = model_and_optimizer()
    reduction = reduce_gradients(model, DDPConfig(mode="reduce-scatter"))
    sharded = shard_optimizer(
        optimizer, reduction, wrap=lambda inner: swap_optimizer(inner, OFFLOADING)
    )
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    sharded.step()
    sharded.wait()
    return "" if not torch.equal(before, model[0].weight) else "nothing was stepped"


def model_and_optimizer() -> tuple[nn.Sequential, optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, optim.AdamW(model.parameters())


def test_refused_in_either_order() -> None:
    for told in run_ranks(refused_in_either_order, 2):
        swap, reduce = told
        assert "is left to reduce_gradients" in swap
        assert "leave offload_gradients off" in swap
        assert (
            "the gradient of 0.weight is taken by swap_optimizer(offload_gradients=True)" in reduce
        )
        assert "leave offload_gradients off" in reduce


def test_refused_when_it_is_unfrozen() -> None:
    for told in run_ranks(frozen_at_first, 2):
        assert "the gradient of 1.weight is taken by swap_optimizer" in told


@pytest.mark.filterwarnings("error")
def test_parts_may_be_offloaded() -> None:
    assert run_ranks(parts_may_be_offloaded, 2) == ["", ""]
