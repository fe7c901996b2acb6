"""Operators and FLOPs, forward and backward apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ascend_core.testing import count_ops, parametrize_devices


@parametrize_devices()
def test_forward_and_backward_are_counted_apart(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    x_BH = torch.randn(3, 4, device=device)
    with count_ops() as ops:
        model(x_BH).sum().backward()
    assert ops.forward["aten.addmm"] == 2
    assert ops.forward["aten.gelu"] == 1
    assert ops.backward["aten.gelu"] == 0
    assert ops.backward["aten.gelu_backward"] == 1
    assert ops.backward["aten.mm"] == 3  # x needs no gradient
    assert ops.total["aten.sum"] == ops.forward["aten.sum"] + ops.backward["aten.sum"]


def test_flops_of_matmuls_are_those_of_hand_arithmetic() -> None:
    weight_HF = torch.randn(4, 8, requires_grad=True)
    x_BH = torch.randn(3, 4, requires_grad=True)
    with count_ops() as ops:
        (x_BH @ weight_HF).sum().backward()
    assert ops.forward_flops == 2 * 3 * 4 * 8
    assert ops.backward_flops == 2 * ops.forward_flops
    assert ops.flops == 3 * ops.forward_flops


def test_what_a_checkpoint_runs_again_shows_in_backward() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)

    def act(h: torch.Tensor) -> torch.Tensor:
        return F.gelu(h) @ weight

    with count_ops() as plain:
        act(x).sum().backward()
    with count_ops() as changed:
        checkpoint(act, x, use_reentrant=False).sum().backward()
    extra = changed.extra_in_backward(plain)
    assert extra["aten.gelu"] == 1
    assert extra["aten.mm"] == 0
    assert changed.backward_flops == plain.backward_flops


def test_nothing_is_counted_outside_of_the_block() -> None:
    with count_ops() as ops:
        pass
    torch.ones(2).exp()
    assert not ops.total
