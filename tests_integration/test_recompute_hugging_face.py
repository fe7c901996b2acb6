"""Recompute on models written as Hugging Face's are: functional code inside forwards.

The figures below were checked on transformers 5.24, whose modules these follow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_core.testing import RunRecord, assert_bitwise_equal, held_bytes, record_run
from ascend_recompute import policy, recompute_activation, recompute_layers, recompute_norm
from ascend_recompute.norm import DEFAULT as NORMS
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

ONE = BATCH * SEQUENCE * HIDDEN * 4  # bytes of one hidden state in FP32
STATE = torch.get_rng_state().nbytes


def held(model: nn.Module, batch: Tensor) -> int:
    return held_bytes(lambda: model(batch))


def small(chosen: policy.Policy) -> policy.Policy:
    return dataclasses.replace(chosen, min_bytes=0)


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "activation": lambda model: recompute_activation(model, policy=small(policy.DEFAULT)),
    "norm": lambda model: recompute_norm(model, policy=small(NORMS)),
    "block": recompute_layers,
    "uniform": lambda model: recompute_layers(model, method="uniform", num_layers=2),
}
by_kind = pytest.mark.parametrize("kind", ["llama", "gpt2"])
by_verb = pytest.mark.parametrize("verb", list(VERBS))
by_checkpointing = pytest.mark.parametrize("reentrant", [None, False, True], ids=str)


@functools.cache
def plain(kind: str) -> RunRecord:
    return record_run(lambda: Model(kind), tokens, forward=loss_of)


@by_checkpointing
@by_verb
@by_kind
def test_five_steps(kind: str, verb: str, reentrant: bool | None) -> None:
    def make() -> nn.Module:
        model = Model(kind)
        if reentrant is not None:
            model.gradient_checkpointing_enable(use_reentrant=reentrant)
        return model

    def turn_on(model: nn.Module, _: Any) -> Any:
        return VERBS[verb](model)

    assert_bitwise_equal(plain(kind), record_run(make, tokens, forward=loss_of, apply=turn_on))


@pytest.mark.parametrize(
    ("kind", "verb", "dropped"),
    [
        # silu and the product.
        ("llama", "activation", LAYERS * 2 * BATCH * SEQUENCE * INNER * 4),
        # Of each norm the normalised input, and its product with the weight.
        ("llama", "norm", (2 * LAYERS + 1) * 2 * ONE),
        # x / 2, tanh, 1 + tanh and their product, each four times as wide as a hidden state.
        ("gpt2", "activation", LAYERS * 4 * 4 * ONE),
        ("gpt2", "norm", (2 * LAYERS + 1) * ONE),
    ],
)
def test_values_that_are_not_held(kind: str, verb: str, dropped: int) -> None:
    model, batch = Model(kind, dropout=0.0), tokens()
    before = held(model, batch)
    handle = VERBS[verb](model)
    assert before - held(model, batch) == dropped
    assert handle.report()["saved_bytes"] == dropped


@by_kind
def test_layers_that_are_not_held(kind: str) -> None:
    model, batch = Model(kind, dropout=0.0), tokens()
    before = held(model, batch)
    handle = recompute_layers(model)
    after = held(model, batch)
    assert before - after == handle.report()["saved_bytes"] - LAYERS * STATE


@pytest.mark.parametrize("reentrant", [False, True])
@by_verb
@by_kind
def test_beside_gradient_checkpointing_it_holds_no_more(
    kind: str, verb: str, *, reentrant: bool
) -> None:
    batch = tokens()

    def measured(*, checkpointing: bool, on: bool) -> int:
        model = Model(kind, dropout=0.0)
        if checkpointing:
            model.gradient_checkpointing_enable(use_reentrant=reentrant, preserve_rng_state=False)
        if on:
            VERBS[verb](model)
        return held(model, batch)

    user = measured(checkpointing=True, on=False)
    ours = measured(checkpointing=False, on=True)
    # Whole layers are ours then, and a replay keeps the random state, which the user did without.
    states = LAYERS * STATE if verb in ("block", "uniform") else 0
    assert measured(checkpointing=True, on=True) <= min(user, ours) + states
