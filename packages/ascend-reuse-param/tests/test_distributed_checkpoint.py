"""Torch's distributed checkpoint, in both directions between masters beside weights and in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ascend_core import windowed
from ascend_core.testing import bitwise_equal
from ascend_reuse_param import ReuseParamConfig, reuse_param

WRAPS: dict[str, Callable[[optim.Optimizer], optim.Optimizer]] = {
    "beside": lambda optimizer: windowed(optimizer, master_weights=True),
    "reuse": lambda optimizer: reuse_param(optimizer, ReuseParamConfig(times=3)),
}


def make(wrap: str) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 5)).bfloat16()
    return model, WRAPS[wrap](optim.AdamW(model.parameters(), lr=1e-2))


def train(model: nn.Module, optimizer: optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(4, 20).bfloat16()).float().square().mean())
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in WRAPS for b in WRAPS])
def test_resume_through_files(before: str, after: str, flatten: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    whole, whole_optimizer = make("beside")
    train(whole, whole_optimizer, range(5))

    first, old = make(before)
    train(first, old, range(3))
    saved = get_optimizer_state_dict(first, old, options=options)
    dcp.save({"model": first.state_dict(), "optimizer": saved}, checkpoint_id=tmp_path / "saved")

    second, new = make(after)
    loaded = {
        "model": second.state_dict(),
        "optimizer": get_optimizer_state_dict(second, new, options=options),
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    second.load_state_dict(loaded["model"])
    set_optimizer_state_dict(second, new, loaded["optimizer"], options=options)
    train(second, new, range(3, 5))
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert bitwise_equal(one, other)
        left, right = whole_optimizer.state[one], new.state[other]
        assert bitwise_equal(left["master_param"], right["master_param"])
