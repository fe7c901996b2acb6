"""What the other ranks are told when one does not come."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.errors import AscendError, ConfigError
from ascend_core.testing import RanksFailedError, run_ranks
from ascend_ddp import DDPConfig, ShardedConfig, reduce_gradients, shard_optimizer

SECONDS = 3.0


class Breaking:
    """What happens behind the second step of a rank's parts."""

    def __init__(self, breaks: Callable[[], None]) -> None:
        self._breaks = breaks
        self._steps = 0

    def __call__(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == 2:
            self._breaks()


def fails() -> None:
    raise ArithmeticError("on purpose")


def dies() -> None:
    os._exit(7)


def train(rank: int, breaks: Callable[[], None]) -> list[str]:
    """Two steps, of which rank 1 breaks the second; what each further call says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    reduction = reduce_gradients(model, DDPConfig(mode="reduce-scatter", timeout_s=SECONDS))

    def wrap(parts: optim.Optimizer) -> optim.Optimizer:
        if rank == 1:
            parts.register_step_post_hook(Breaking(breaks))
        return parts

    given = optim.SGD(model.parameters(), lr=0.1)
    optimizer = shard_optimizer(given, reduction, ShardedConfig(timeout_s=SECONDS), wrap=wrap)
    said = []
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        try:
            optimizer.step()
        except AscendError as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    for call in (lambda: model(torch.ones(2, 8)), optimizer.step, model[0].weight.sum):
        try:
            call()
        except AscendError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_step_that_fails_on_one_rank_ends_on_the_others() -> None:
    """Nobody goes on with weights of which a part was not stepped."""
    others, failed = run_ranks(train, 2, fails)
    assert len(others) == 3
    assert all(re.search("CommunicationError: rank 0 .*waited in vain for ", o) for o in others)
    for said in (others[0], others[2]):  # by whatever reads one
        assert "for the weights of bucket 0.\n" in said
        assert "it holds 1.bias, 1.weight, 0.bias, 0.weight, and its" in said
    assert len(failed) == 2
    for said in failed:
        assert "OptimizerFailedError: a step of the sharded optimizer failed half-way" in said
        assert "on rank 1: ArithmeticError: on purpose" in said


def tell(rank: int) -> None:
    raise AssertionError("\n".join(train(rank, dies)))


def test_a_rank_that_dies_is_told_of() -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(tell, 2)
    assert "exit code 7" in caught.value.failures[1]
    assert "rank 0 of 2 waited in vain for the weights of bucket 0.\n" in caught.value.failures[0]


@pytest.mark.parametrize(
    "options",
    [{"overlap_param_gather": 1}, {"grad_scaler": "yes"}, {"timeout_s": 0}, {"timeout_s": True}],
)
def test_options_that_cannot_be_right(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShardedConfig(**options)
