"""Weights, masters and moments are those of FP32 masters beside the weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.optim import windowed
from ascend_core.testing import bitwise_equal, parametrize_devices
from ascend_reuse_param import ReuseParamConfig, reuse_param

FORMS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {}),
    "adamw-amsgrad-maximize": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adam-decay": (optim.Adam, {"weight_decay": 0.1}),
    "sgd-momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adadelta": (optim.Adadelta, {}),
}
NOT_FUSED = ("rmsprop", "adamax", "nadam", "radam", "adadelta")


def cases() -> Iterator[Any]:
    for name, (kind, options) in OPTIMIZERS.items():
        for form, flags in FORMS.items():
            if not (form == "fused" and name in NOT_FUSED):
                yield pytest.param(kind, {**options, **flags}, id=f"{name}-{form}")


@pytest.mark.parametrize(("kind", "options"), list(cases()))
def test_every_optimizer_in_every_form(
    kind: type[optim.Optimizer], options: dict[str, Any], run: Any
) -> None:
    # (torch's fused SGD cannot begin with some parameters and go on with others.)
    missing = () if kind is optim.SGD and options.get("fused") else (1, 4)
    plain = run("beside", kind=kind, **options).train(6, missing=missing)
    for times in (1, 3, 16):
        config = ReuseParamConfig(times=times)
        ours = run(kind=kind, config=config, **options).train(6, missing=missing)
        assert ours.same_as(plain), times
        moments = plain.optimizer.optimizer.state
        for weight, master in zip(ours.weights, plain.optimizer.masters, strict=True):
            for name, value in moments[master].items():
                assert bitwise_equal(ours.optimizer.state[weight][name], value), name


@parametrize_devices()
@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_steps_of_a_model(form: str, device: torch.device) -> None:
    """Losses too, as integers, with a schedule and clipping."""
    whole = trained_model("windowed", FORMS[form], device)
    ours = trained_model("reuse", FORMS[form], device)
    assert whole[0] == ours[0]
    assert all(map(bitwise_equal, whole[1], ours[1]))


def trained_model(
    how: str, form: dict[str, bool], device: torch.device
) -> tuple[list[int], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7))
    model = model.bfloat16().to(device)
    inner = optim.AdamW(model.parameters(), lr=1e-2, **form)
    optimizer = (
        reuse_param(inner, ReuseParamConfig(times=2))
        if how == "reuse"
        else windowed(inner, master_weights=True, times=2)
    )
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    inputs = torch.randn(100, 8, 33).bfloat16()
    losses = []
    for one in inputs:
        loss = model(one.to(device)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(int(loss.detach().cpu().view(torch.int32)))
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return losses, [parameter.detach() for parameter in model.parameters()] + kept


@pytest.mark.parametrize("form", FORMS)
def test_a_million_elements(form: str, run: Any) -> None:
    shapes = [(1_000_003,), (7,)]
    plain = run("beside", shapes, **FORMS[form]).train(20)
    assert run("reuse", shapes, **FORMS[form]).train(20).same_as(plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_steps_at_odd_sizes(form: str, run: Any) -> None:
    plain = run("beside", **FORMS[form]).train(100)
    config = ReuseParamConfig(times=2)
    assert run("reuse", config=config, **FORMS[form]).train(100).same_as(plain)


@pytest.mark.parametrize("form", FORMS)
def test_float_gradients(form: str, run: Any) -> None:
    """As a DDP hook or a main_grad of FP32 gives them, by way of a facade of its own dtype."""
    plain, ours = run("beside", **FORMS[form]), run("reuse", **FORMS[form])
    for number in range(4):
        for one in (plain, ours):
            one.backward(number)
            for weight in one.weights:
                weight.grad.mul_(3)
            one.optimizer.step()
    assert ours.same_as(plain)


def test_gradients_are_accumulated(run: Any) -> None:
    plain, ours = run("beside"), run("reuse")
    for one in (plain, ours):
        for number in range(4):
            one.backward(number)
            held = [weight.grad for weight in one.weights]
            one.backward(number + 50)
            for weight, gradient in zip(one.weights, held, strict=True):
                weight.grad += gradient
            one.optimizer.step()
    assert ours.same_as(plain)


@pytest.mark.parametrize("form", FORMS)
def test_clipping_and_scaling(form: str, run: Any) -> None:
    """The facade's own clipping, and a scaler that skips the second of four steps."""
    ends = []
    for how in ("windowed", "reuse"):
        one = run(how, **FORMS[form])
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(4):
            one.backward(number)
            scaler.scale(torch.zeros(()))  # makes the scale
            if number == 1:
                one.weights[4].grad[0, 0] = float("inf")
            one.optimizer.clip_grad_norm_(1.0)
            scaler.step(one.optimizer)
            scaler.update()
            one.optimizer.zero_grad()
        ends.append(one)
    assert ends[0].same_as(ends[1])


def test_mixed_dtypes_frozen_and_tied_parameters() -> None:
    def trained(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        embedding = nn.Embedding(20, 16).bfloat16()
        head = nn.Linear(16, 20, bias=False).bfloat16()
        head.weight = embedding.weight
        norm = nn.LayerNorm(16)  # FP32
        frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)
        model = nn.ModuleList([embedding, norm, frozen, head])
        optimizer = wrap(optim.AdamW(model.parameters(), lr=1e-2))
        for _ in range(5):
            hidden = norm(embedding(torch.arange(20)).float()).bfloat16()
            head(frozen(hidden)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    kept = trained(lambda inner: windowed(inner, master_weights=True))
    assert all(map(bitwise_equal, kept, trained(reuse_param)))


def test_two_models_do_not_meet(run: Any) -> None:
    alone = run("reuse").train(4)
    one, other = run("reuse"), run("reuse", lr=0.5)
    for number in range(4):
        one.train(1, number)
        other.train(1, number)
    assert one.same_as(alone)
