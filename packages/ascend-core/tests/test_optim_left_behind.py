"""State that an optimizer has for parameters of no group is not the facade's to drop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from ascend_core.optim import windowed
from ascend_core.testing import bitwise_equal


def train(optimizer: Any, params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()


def left_out() -> tuple[list[nn.Parameter], Any]:
    """Two parameters, of which the second was stepped and stands in no group any more."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(50))]
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2)
    train(optimizer, params, 0)
    optimizer.param_groups.pop()
    return params, optimizer


def test_it_is_still_there_after_remove() -> None:
    params, inner = left_out()
    before = inner.state[params[1]]["exp_avg"].clone()
    optimizer = windowed(inner, times=2)
    train(optimizer, params, 1)
    optimizer.remove()
    assert bitwise_equal(inner.state[params[1]]["exp_avg"], before)
    assert inner.state[params[1]]["step"] == 1
    assert inner.state[params[0]]["step"] == 2


def test_it_moves_in_when_its_parameter_is_added() -> None:
    plain, left = left_out()
    ours, inner = left_out()
    optimizer = windowed(inner, times=2)
    for each, params in ((left, plain), (optimizer, ours)):
        train(each, params, 1)
        each.add_param_group({"params": params[1:]})
        train(each, params, 2)
        assert each.state[params[1]]["step"] == 2
    assert all(map(bitwise_equal, plain, ours))
    assert ours[1] not in inner.state
