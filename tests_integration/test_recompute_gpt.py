"""Activation recompute on the suite's GPT, which knows nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascend_core.memory import measure_peak
from ascend_core.testing import (
    Growth,
    RunRecord,
    alive_after,
    assert_bitwise_equal,
    count_ops,
    held_bytes,
    record_run,
)
from ascend_recompute import policy, recompute_activation
from ascend_suite.demo.gpt import GPT, GPTConfig

LAYERS, HIDDEN, SEQ, BATCH = 2, 32, 16, 3
EVERY_SIZE = dataclasses.replace(policy.DEFAULT, min_bytes=0)
CONFIGS = [
    GPTConfig(
        layers=LAYERS, hidden=HIDDEN, heads=2, seq=SEQ, activation=activation, norm=norm,
        dropout=0.1,
    )
    for activation in ("gelu", "swiglu")
    for norm in ("rms", "layer")
]  # fmt: skip
AUTOCAST = [None, torch.bfloat16]

every_gpt = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.activation}-{c.norm}")
every_precision = pytest.mark.parametrize("autocast", AUTOCAST, ids=["fp32", "autocast"])

Batch = tuple[Tensor, Tensor]


def batch(_: int = 0) -> Batch:
    tokens = torch.randint(256, (BATCH, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Batch) -> Tensor:
    # `loss` calls the model as a module, so that what is around its forward takes effect.
    assert isinstance(model, GPT)
    return model.loss(*tokens)


def train(config: GPTConfig, *, on: bool, **options: Any) -> RunRecord:
    apply = (lambda model, _: recompute_activation(model, policy=EVERY_SIZE)) if on else None
    options = {"forward": loss_of, **options}
    return record_run(lambda: GPT(config), batch, apply=apply, **options)


def assert_same_training(config: GPTConfig, **options: Any) -> RunRecord:
    plain, ours = (train(config, on=on, **options) for on in (False, True))
    assert_bitwise_equal(plain, ours)
    assert ours.report["saved_bytes"] > 0
    return ours


def output_bytes(config: GPTConfig, autocast: torch.dtype | None) -> int:
    """Bytes of what the activation functions of one MLP make, and of the product of the gates."""
    outputs = 2 if config.activation == "swiglu" else 1
    width = config.expansion * config.hidden
    return (
        outputs * BATCH * SEQ * width * (torch.float32 if autocast is None else autocast).itemsize
    )


def in_precision(autocast: torch.dtype | None, fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return fn()

    return run


@every_precision
@every_gpt
def test_five_steps_are_equal(config: GPTConfig, autocast: torch.dtype | None) -> None:
    ours = assert_same_training(config, steps=5, autocast=autocast)
    assert len(set(ours.losses)) == 5
    assert ours.report["saved_bytes"] == LAYERS * output_bytes(config, autocast)


@every_gpt
def test_gradient_accumulation(config: GPTConfig) -> None:
    assert_same_training(config, steps=2, accumulate=3)


@every_gpt
def test_tied_embedding_and_frozen_layers(config: GPTConfig) -> None:
    def make() -> nn.Module:
        model = GPT(config)
        model.head.weight = model.token_embedding.weight
        model.blocks[0].mlp.requires_grad_(False)
        model.position_embedding.requires_grad_(False)
        return model

    def run(*, on: bool) -> RunRecord:
        apply = (lambda model, _: recompute_activation(model, policy=EVERY_SIZE)) if on else None
        return record_run(make, batch, apply=apply, forward=loss_of, steps=3)

    assert_bitwise_equal(run(on=False), run(on=True))


@every_precision
@every_gpt
def test_saved_bytes_fall_by_the_outputs_of_the_activations(
    config: GPTConfig, autocast: torch.dtype | None
) -> None:
    model, tokens = GPT(config), batch()
    forward = in_precision(autocast, lambda: loss_of(model, tokens))
    plain = held_bytes(forward)
    handle = recompute_activation(model, policy=EVERY_SIZE)
    ours = held_bytes(forward)
    layer = output_bytes(config, autocast)
    assert handle.report()["saved_bytes_by_module"] == {
        f"blocks.{number}.mlp": layer for number in range(LAYERS)
    }
    assert plain - ours == handle.report()["saved_bytes"] == LAYERS * layer


@every_precision
@every_gpt
def test_backward_runs_the_activations_again_and_no_matmul(
    config: GPTConfig, autocast: torch.dtype | None
) -> None:
    model, tokens = GPT(config), batch()
    step = in_precision(autocast, lambda: loss_of(model, tokens))
    with count_ops() as plain:
        step().backward()
    model.zero_grad()
    recompute_activation(model, policy=EVERY_SIZE)
    with count_ops() as ours:
        step().backward()
    extra = ours.extra_in_backward(plain)
    for alias in ("aten.detach", "aten.empty", "aten.set_"):  # they move and compute nothing
        del extra[alias]
    rebuilt = {"aten.silu": 1, "aten.mul": 1} if config.activation == "swiglu" else {"aten.gelu": 1}
    assert extra == {name: LAYERS * count for name, count in rebuilt.items()}
    assert ours.backward_flops == plain.backward_flops > 0
    assert ours.forward_flops == plain.forward_flops > 0


@every_gpt
def test_the_peak_of_a_step_falls(config: GPTConfig) -> None:
    def peak(*, on: bool) -> int:
        torch.manual_seed(0)
        model = GPT(dataclasses.replace(config, layers=6))
        if on:
            recompute_activation(model, policy=EVERY_SIZE)
        tokens = batch()
        loss_of(model, tokens).backward()
        with measure_peak("cpu") as memory:
            loss_of(model, tokens).backward()
        return memory.peak_bytes

    # At the worst moment one layer, and what its backward makes, is there.
    assert peak(on=False) - peak(on=True) >= 4 * output_bytes(config, None)


@every_gpt
def test_training_goes_on_from_a_checkpoint_of_the_other_kind(config: GPTConfig) -> None:
    def run(first: bool, second: bool) -> list[Tensor]:
        torch.manual_seed(0)
        saved: Any = None
        model = GPT(config)
        for on in (first, second):
            model = GPT(config) if saved else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if saved:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                torch.set_rng_state(saved[2])
            if on:
                recompute_activation(model, policy=EVERY_SIZE)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model, batch()).backward()
                optimizer.step()
            saved = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        return [value.detach() for value in model.state_dict().values()]

    plain = run(False, False)
    for kinds in ((True, False), (False, True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(*kinds), strict=True))


def test_evaluation_and_generation_are_as_before() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(CONFIGS[2]).eval(), batch()
    with torch.no_grad():
        plain = model(tokens[0])
    handle = recompute_activation(model, policy=EVERY_SIZE)
    with torch.inference_mode():
        assert torch.equal(model(tokens[0]), plain)
    assert torch.equal(model(tokens[0]), plain)  # with gradients, in eval mode
    handle.remove()
    assert type(model) is GPT


def test_nothing_grows_over_fifty_steps() -> None:
    model = GPT(CONFIGS[2])
    optimizer = torch.optim.AdamW(model.parameters())
    recompute_activation(model, policy=EVERY_SIZE)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch()).backward()
        optimizer.step()

    assert alive_after(step, steps=50) == Growth(nbytes=0, storages=0)
