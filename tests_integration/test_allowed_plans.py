"""What rules of the suite refuse by default, and works: the proof that such a rule names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import nn

from ascend_core.testing import RunRecord, assert_bitwise_equal, record_run
from ascend_recompute import policy, recompute_activation, recompute_layers
from ascend_swap import SwapAttentionConfig, swap_attention
from tests_integration.hugging_face import Model, loss_of, tokens

TurnOn = Callable[[nn.Module], Any]
EVERYTHING = SwapAttentionConfig(min_bytes=1, keep_last=0)
TWO_MLPS = dataclasses.replace(EVERYTHING, recompute_num_layers=2)


class Handles:
    """Handles of several features as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def report(self) -> dict[str, Any]:
        return {key: value for handle in self.handles for key, value in handle.report().items()}

    def remove(self) -> None:
        for handle in reversed(self.handles):
            handle.remove()


def trained(*features: TurnOn) -> RunRecord:
    def apply(model: nn.Module, _: object) -> Handles:
        return Handles([turn_on(model) for turn_on in features])

    return record_run(lambda: Model("llama"), tokens, forward=loss_of, accumulate=2, apply=apply)


@functools.cache
def plain() -> RunRecord:
    return trained()


def activation(model: nn.Module) -> Any:
    return recompute_activation(
        model, policy=dataclasses.replace(policy.DEFAULT, min_bytes=0), verify=True
    )


def two_mlps(model: nn.Module) -> Any:
    return swap_attention(model, TWO_MLPS)


def attention(model: nn.Module) -> Any:
    return swap_attention(model, EVERYTHING)


@pytest.mark.parametrize("order", [1, -1], ids=["activation first", "swap first"])
def test_mlps_that_run_again_and_are_rebuilt(order: int) -> None:
    alone = trained(activation)
    ours = trained(*(activation, two_mlps)[::order])
    assert_bitwise_equal(plain(), ours)
    # In two of three layers nothing is left to rebuild.
    assert 0 < ours.report["saved_bytes"] < alone.report["saved_bytes"]


@pytest.mark.parametrize("order", [1, -1], ids=["layers first", "swap first"])
def test_attention_in_layers_that_all_run_again(order: int) -> None:
    ours = trained(*(recompute_layers, attention)[::order])
    assert_bitwise_equal(plain(), ours)
    assert ours.report["moved_bytes"] == 0
