"""An opaque activation function, called by way of `FusedActivation`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.errors import ReplayError
from ascend_core.testing import bitwise_equal, count_ops, held_bytes
from ascend_recompute import FusedActivation, policy, recompute_activation
from ascend_recompute.policy import Policy

BATCH, HIDDEN, INNER = 6, 16, 64
WIDE = BATCH * INNER * 4
SMALL = Policy(policy.DEFAULT.operators, policy.DEFAULT.random, min_bytes=0)


class BiasSilu(torch.autograd.Function):
    """As fused kernels are: it saves its inputs and returns a new tensor."""

    keeps_input = True

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.clone() if not cls.keeps_input else x, bias)
        return F.silu(x + bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        y = x + bias
        gate = torch.sigmoid(y)
        grad = grads[0] * gate * (1 + y * (1 - gate))
        return grad, grad.sum(0)


class BiasSiluOfACopy(BiasSilu):
    keeps_input = False


class MLP(nn.Module):
    def __init__(self, activation: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN)
        self.bias = nn.Parameter(torch.zeros(INNER))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(x), self.bias))
        return out


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_its_output_is_rebuilt() -> None:
    torch.manual_seed(0)
    plain, x = MLP(BiasSilu.apply), torch.randn(BATCH, HIDDEN)
    ours = copy.deepcopy(plain)
    ours.activation = FusedActivation(BiasSilu.apply)
    handle = recompute_activation(ours, policy=SMALL, verify=True)
    with count_ops() as first:
        expected = gradients(plain, x)
    with count_ops() as second:
        assert all(map(bitwise_equal, expected, gradients(ours, x)))
    assert handle.report()["saved_bytes"] == WIDE
    assert second.extra_in_backward(first)["aten.silu"] == 1


def test_without_the_verb_it_is_the_function() -> None:
    model, x = MLP(BiasSilu.apply), torch.randn(BATCH, HIDDEN)
    place = torch.get_default_device()
    before = held_bytes(lambda: model(x), device=place)
    model.activation = FusedActivation(BiasSilu.apply)
    assert held_bytes(lambda: model(x), device=place) == before
    handle = recompute_activation(model, policy=SMALL)
    assert held_bytes(lambda: model(x), device=place) <= before - WIDE  # (torch_npu rounds up)
    handle.remove()
    assert held_bytes(lambda: model(x), device=place) == before


def test_a_function_that_keeps_no_input_is_left_alone() -> None:
    """Its input would have to be held for the recipe alone."""
    model, x = MLP(FusedActivation(BiasSiluOfACopy.apply)), torch.randn(BATCH, HIDDEN)
    handle = recompute_activation(model, policy=SMALL)
    model(x).square().sum().backward()
    assert handle.report()["saved_bytes"] == 0


def test_what_is_not_deterministic_is_noticed() -> None:
    calls: list[int] = []

    def drifting(x: Tensor, bias: Tensor) -> Any:
        calls.append(1)
        return BiasSilu.apply(x, bias) + len(calls)

    model, x = MLP(FusedActivation(drifting)), torch.randn(BATCH, HIDDEN)
    recompute_activation(model, policy=SMALL, verify=True)
    with pytest.raises(ReplayError, match="run_fused"):
        model(x).square().sum().backward()
