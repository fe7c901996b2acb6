"""Recompute and swap-optimizer together: every loss, gradient and weight is the plain run's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core.testing import RunRecord, assert_bitwise_equal, available_devices, record_run
from ascend_recompute import policy, recompute_activation, recompute_layers
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_swap import SwapOptimizerConfig, swap_optimizer

SEQ, BATCH = 16, 3
GPT_CONFIG = GPTConfig(
    layers=3, hidden=32, heads=2, seq=SEQ, activation="swiglu", norm="rms", dropout=0.1
)
EVERY_SIZE = dataclasses.replace(policy.DEFAULT, min_bytes=0)

Batch = tuple[Tensor, Tensor]


def by_activation(model: nn.Module) -> Any:
    return recompute_activation(model, policy=EVERY_SIZE)


def by_layer(model: nn.Module) -> Any:
    return recompute_layers(model, method="block", num_layers=2)


RECOMPUTE = {"activation": by_activation, "layers": by_layer}
SWAP: dict[str, SwapOptimizerConfig] = {
    "16 windows": SwapOptimizerConfig(),
    "released": SwapOptimizerConfig(swap_optimizer_times=3, release_grads=True),
    "gradients on the host": SwapOptimizerConfig(swap_optimizer_times=3, offload_gradients=True),
}


def batch(_: int) -> Batch:
    tokens = torch.randint(256, (BATCH, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Batch) -> Tensor:
    assert isinstance(model, GPT)
    return model.loss(*tokens)


def trained(
    device: torch.device,
    *,
    recompute: Callable[[nn.Module], Any] | None = None,
    swap: SwapOptimizerConfig | None = None,
    **options: Any,
) -> RunRecord:
    def make_optimizer(model: nn.Module) -> Any:
        plain = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return plain if swap is None else swap_optimizer(plain, swap)

    apply = None if recompute is None else (lambda model, _: recompute(model))
    return record_run(
        lambda: GPT(GPT_CONFIG), batch, forward=loss_of, apply=apply, accumulate=2,
        make_optimizer=make_optimizer, device=device, **options,
    )  # fmt: skip


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("swap", SWAP)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("device", available_devices(), ids=str)
def test_both_together_train_as_neither(
    device: torch.device, recompute: str, swap: str, autocast: torch.dtype | None
) -> None:
    plain = trained(device, autocast=autocast)
    ours = trained(device, recompute=RECOMPUTE[recompute], swap=SWAP[swap], autocast=autocast)
    assert_bitwise_equal(plain, ours)
    assert len(ours.steps) == 5
    assert all(step.gradients for step in ours.steps)
    assert ours.report
