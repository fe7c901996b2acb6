"""fused-ops beside every other feature; those that work on a model in both orders.

Held to fused-ops alone, bit by bit: that one rounds otherwise than the plain run is its own affair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ascend_core.testing import RunRecord, assert_bitwise_equal, held_bytes, record_run
from ascend_ops import apply_fused_ops
from ascend_ops.features import FUSED_OPS
from ascend_recompute import policy, recompute_activation, recompute_layers, recompute_norm
from ascend_recompute.norm import DEFAULT as NORMS
from ascend_reuse_param import ReuseParamConfig, reuse_param
from ascend_suite.demo.result import Status
from ascend_suite.demo.runner import run_demo
from ascend_suite.demo.settings import DemoSettings
from ascend_swap import SwapAttentionConfig, SwapOptimizerConfig, swap_attention, swap_optimizer
from tests_integration.hugging_face import (
    BATCH,
    HIDDEN,
    INNER,
    LAYERS,
    SEQUENCE,
    Model,
    loss_of,
    tokens,
)

TurnOn = Callable[[nn.Module], Any]
PRODUCT = BATCH * SEQUENCE * INNER * 4  # bytes of what the gate was multiplied to, in FP32
HIDDEN_STATE = BATCH * SEQUENCE * HIDDEN * 4

# What recomputes by operators of torch knows no others until it is told of them.
EVERY_ACTIVATION = dataclasses.replace(policy.DEFAULT, min_bytes=0).extended(
    torch.ops.ascend_ops.swiglu.default, torch.ops.ascend_ops.swiglu_pair.default
)
EVERY_NORM = dataclasses.replace(NORMS, min_bytes=0).extended(torch.ops.ascend_ops.rms_norm.default)
OTHERS: dict[str, TurnOn] = {
    "swap": lambda model: swap_attention(
        model,
        SwapAttentionConfig(
            min_bytes=1,
            keep_last=0,
            swap_modules="input_layernorm,self_attn,post_attention_layernorm,mlp",
        ),
    ),
    "activation": lambda model: recompute_activation(
        model, policy=dataclasses.replace(policy.DEFAULT, min_bytes=0), verify=True
    ),
    "activation, told": lambda model: recompute_activation(
        model, policy=EVERY_ACTIVATION, verify=True
    ),
    "norm": lambda model: recompute_norm(
        model, policy=dataclasses.replace(NORMS, min_bytes=0), verify=True
    ),
    "norm, told": lambda model: recompute_norm(model, policy=EVERY_NORM, verify=True),
    "layers": lambda model: recompute_layers(model, num_layers=2, verify=True),
}
by_order = pytest.mark.parametrize("first", [True, False], ids=["ops first", "ops last"])


class Both:
    """Two handles, of which the first tells what it did."""

    def __init__(self, other: Any, ours: Any) -> None:
        self.other, self.ours = other, ours

    def report(self) -> dict[str, Any]:
        return {**self.other.report(), **self.ours.report()}

    def remove(self) -> None:
        self.other.remove()
        self.ours.remove()


def together(model: nn.Module, other: TurnOn, *, first: bool) -> Both:
    if first:
        ours = apply_fused_ops(model)
        return Both(other(model), ours)
    theirs = other(model)
    return Both(theirs, apply_fused_ops(model))


@functools.cache
def alone(autocast: torch.dtype | None) -> RunRecord:
    return record_run(
        lambda: Model("llama"), tokens, forward=loss_of, accumulate=2, autocast=autocast,
        apply=lambda model, _: apply_fused_ops(model),
    )  # fmt: skip


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "autocast"])
@by_order
@pytest.mark.parametrize("other", OTHERS)
def test_five_steps(other: str, first: bool, autocast: torch.dtype | None) -> None:
    kinds: list[type] = []

    def apply(model: nn.Module, _: object) -> Both:
        return together(model, OTHERS[other], first=first)

    def build() -> nn.Module:
        model = Model("llama")
        kinds.extend(type(module) for module in model.modules())
        return model

    ours = record_run(build, tokens, forward=loss_of, accumulate=2, autocast=autocast, apply=apply)
    assert_bitwise_equal(alone(autocast), ours)
    assert ours.report["operators"] == {"rms_norm": 2 * LAYERS + 1, "swiglu_pair": LAYERS}
    if other.endswith("told"):
        assert ours.report["saved_bytes"] > 0


@by_order
@pytest.mark.parametrize("other", OTHERS)
def test_either_may_be_removed_first(other: str, first: bool) -> None:
    model = Model("llama", dropout=0.0)
    kinds = [type(module) for module in model.modules()]
    for ours_goes_first in (True, False):
        handles = together(model, OTHERS[other], first=first)
        for handle in (handles.ours, handles.other)[:: 1 if ours_goes_first else -1]:
            loss_of(model, tokens()).backward()
            handle.remove()
        assert [type(module) for module in model.modules()] == kinds


def held(model: nn.Module, batch: Tensor) -> int:
    loss_of(model, batch).backward()
    return held_bytes(lambda: model(batch))


@by_order
def test_the_product_is_rebuilt_where_recompute_was_told_of_the_operator(first: bool) -> None:
    model, batch = Model("llama", dropout=0.0), tokens()
    ours = apply_fused_ops(model)
    fused = held(model, batch)
    ours.remove()
    handles = together(model, OTHERS["activation, told"], first=first)
    # A scalar that the rebuild needs is held.
    assert 0 <= LAYERS * PRODUCT - (fused - held(model, batch)) <= LAYERS * 8
    assert handles.report()["saved_bytes"] == LAYERS * PRODUCT


@by_order
def test_norms_are_rebuilt_where_recompute_was_told_of_the_operator(first: bool) -> None:
    model, batch = Model("llama", dropout=0.0), tokens()
    handles = together(model, OTHERS["norm, told"], first=first)
    loss_of(model, batch).backward()
    assert handles.report()["saved_bytes"] == (2 * LAYERS + 1) * HIDDEN_STATE


@by_order
def test_recompute_that_was_not_told_keeps_what_it_does_not_know(first: bool) -> None:
    """It saves nothing then, and is right all the same."""
    model, batch = Model("llama", dropout=0.0), tokens()
    ours = apply_fused_ops(model)
    fused = held(model, batch)
    ours.remove()
    handles = together(model, OTHERS["activation"], first=first)
    assert held(model, batch) == fused
    assert handles.report()["saved_bytes"] == 0


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_optimizers_that_keep_state_elsewhere() -> None:
    def run(dtype: torch.dtype, make_optimizer: Callable[[nn.Module], Any]) -> RunRecord:
        return record_run(
            lambda: Model("llama").to(dtype), tokens, forward=loss_of,
            make_optimizer=make_optimizer, apply=lambda model, _: apply_fused_ops(model),
        )  # fmt: skip

    def swapped(model: nn.Module) -> Any:
        return swap_optimizer(adamw(model), SwapOptimizerConfig(swap_optimizer_times=3))

    def masters(model: nn.Module) -> Any:
        return swap_optimizer(adamw(model), SwapOptimizerConfig(master_weights=True))

    def reused(model: nn.Module) -> Any:
        return reuse_param(adamw(model), ReuseParamConfig(times=3))

    assert_bitwise_equal(run(torch.float32, adamw), run(torch.float32, swapped))
    assert_bitwise_equal(run(torch.bfloat16, masters), run(torch.bfloat16, reused))


def test_the_demo_shows_it() -> None:
    settings = DemoSettings(
        layers=2, hidden=64, seq=64, batch=8, steps=6, memory_steps=2, time_rounds=1
    )
    result = run_demo(settings, features={"fused-ops": FUSED_OPS}, device="cpu")
    plain, ours = result.runs
    assert result.failures == ()
    assert ours.report["operators"] == {"rms_norm": 5, "swiglu_pair": 2}
    assert ours.loss_difference is not None and ours.loss_difference < 1e-4
    assert plain.peak_bytes is not None and ours.peak_bytes is not None
    assert plain.peak_bytes - ours.peak_bytes >= 8 * 64 * 4 * 64 * 4  # silu of a layer, at least


def test_the_demos_other_model_has_nothing_to_do() -> None:
    settings = DemoSettings(
        layers=1, hidden=32, seq=32, batch=2, steps=3, memory_steps=1, time_rounds=1, timed_steps=1,
        activation="gelu", norm="layer",
    )  # fmt: skip
    result = run_demo(settings, features={"fused-ops": FUSED_OPS}, device="cpu")
    assert result.runs[1].status is Status.NOTHING_TO_DO
