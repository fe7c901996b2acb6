"""What a windowed optimizer is given and cannot take is refused by name, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.errors import ConfigError, FeatureError
from ascend_core.optim import AttributeGradients, Slot, flattened, windowed
from ascend_core.testing import bitwise_equal


def parameters(*shapes: Any, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes or (300, 5)]


def train(optimizer: Any, params: list[nn.Parameter], *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    "state_dict",
    [
        None,
        [],
        {},
        {"state": {}},
        {"state": {}, "param_groups": None},
        {"state": [], "param_groups": []},
        {"state": {}, "param_groups": [1]},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": {0: 5}, "param_groups": [{"params": [0, 1]}]},
        {"state": {}, "param_groups": [{"params": [0, 1]}]},
    ],
)
def test_what_is_no_state_dict_is_refused(state_dict: Any) -> None:
    params = parameters()
    optimizer = windowed(optim.AdamW(params))
    train(optimizer, params, 0)
    before = optimizer.state[params[0]]["exp_avg"].clone()
    with pytest.raises(ConfigError, match=r"no optimizer's state_dict|groups lack"):
        optimizer.load_state_dict(state_dict)
    assert bitwise_equal(optimizer.state[params[0]]["exp_avg"], before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_of_another_kind_is_refused(steps: int) -> None:
    params, others = parameters(), parameters()
    sgd = optim.SGD(others, lr=5.0)
    train(sgd, others, *range(steps))
    optimizer = windowed(optim.AdamW(params))
    with pytest.raises(ConfigError, match="lack betas, eps"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert "momentum" not in optimizer.param_groups[0]


def test_a_checkpoint_of_an_older_torch_is_loaded() -> None:
    params = parameters()
    optimizer = windowed(optim.AdamW(params))
    train(optimizer, params, 0)
    saved = optimizer.state_dict()
    for name in ("fused", "capturable", "decoupled_weight_decay", "maximize"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    train(optimizer, params, 1)


def test_the_wrapped_optimizer_neither_saves_nor_loads() -> None:
    params = parameters()
    inner = optim.AdamW(params)
    train(inner, params, 0)
    saved = inner.state_dict()
    optimizer = windowed(inner)
    with pytest.raises(FeatureError, match=r"was wrapped, and its own state_dict\(\) was called"):
        inner.state_dict()
    with pytest.raises(FeatureError, match=r"its own load_state_dict\(\) was called"):
        inner.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.remove()
    inner.load_state_dict(inner.state_dict())


def test_a_differentiable_group_is_refused() -> None:
    params = parameters()
    optimizer = windowed(optim.AdamW(params[:1]))
    with pytest.raises(ConfigError, match="a differentiable optimizer"):
        optimizer.add_param_group({"params": params[1:], "differentiable": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match="a differentiable optimizer"):
        windowed(optim.AdamW(params, differentiable=True))


def test_inference_mode_is_refused() -> None:
    params = parameters()
    plain = optim.AdamW(params)
    with torch.inference_mode(), pytest.raises(ConfigError, match="used in inference mode"):
        windowed(plain)
    optimizer = windowed(plain)
    with torch.inference_mode():
        made = torch.ones(300)
        with pytest.raises(ConfigError, match="used in inference mode"):
            train(optimizer, params, 0)
    params[0].grad, params[1].grad = made, None
    before = params[0].detach().clone()
    with pytest.raises(ConfigError, match="was made in inference mode"):
        optimizer.step()
    assert bitwise_equal(params[0], before)
    train(optimizer, params, 0)


class Scaled(optim.AdamW):
    """A subclass whose helper reads what its instance was given."""

    def __init__(self, params: Any, factor: float) -> None:
        super().__init__(params, lr=1e-2)
        self.factor = factor

    def _init_group(self, group: Any, *args: Any) -> Any:
        found = super()._init_group(group, *args)
        for gradient in args[1]:
            gradient.mul_(self.factor)
        return found


def test_attributes_of_a_subclass_reach_its_step() -> None:
    plain, ours = parameters(), parameters()
    optimizer: Any = windowed(Scaled(ours, 0.5), times=3)
    assert optimizer.factor == 0.5
    train(Scaled(plain, 0.5), plain, 0)
    train(optimizer, ours, 0)
    assert all(map(bitwise_equal, plain, ours))


@pytest.mark.parametrize("form", [{"foreach": False}, {"fused": True}])
def test_a_skipped_step_releases_what_a_step_would(form: dict[str, bool]) -> None:
    params = parameters()
    optimizer = windowed(optim.AdamW(params, **form), gradients=AttributeGradients(release=True))
    train(optimizer, params, 0)
    before = [parameter.detach().clone() for parameter in params]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for parameter in params:
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(optimizer)
    assert all(parameter.grad is None for parameter in params)
    assert all(map(bitwise_equal, before, params))


def test_masters_that_are_dropped_are_warned_of() -> None:
    params, others = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    old = windowed(optim.AdamW(params), master_weights=True)
    train(old, params, 0)
    new = windowed(optim.AdamW(others))
    with pytest.warns(UserWarning, match="has FP32 masters that this optimizer does not keep"):
        new.load_state_dict(old.state_dict())
    train(new, others, 1)
    optim.AdamW(others).load_state_dict(old.state_dict())
    old.load_state_dict(old.state_dict())


def test_sums_of_adagrad_begin_with_all_digits_of_a_master() -> None:
    params = parameters(dtype=torch.bfloat16)
    wide = [nn.Parameter(parameter.detach().float()) for parameter in params]
    plain = optim.Adagrad(wide, initial_accumulator_value=0.1)
    ours = windowed(optim.Adagrad(params, initial_accumulator_value=0.1), master_weights=True)
    for parameter, other in zip(params, wide, strict=True):
        parameter.grad = torch.ones_like(parameter)
        other.grad = torch.ones_like(other)
    plain.step()
    ours.step()
    for parameter, other in zip(params, wide, strict=True):
        assert bitwise_equal(ours.state[parameter]["sum"], plain.state[other]["sum"])
        assert bitwise_equal(ours.state[parameter]["master_param"], other)


def test_momentum_may_be_turned_on_after_a_step() -> None:
    plain, ours = parameters(), parameters()
    for optimizer, params in (
        (optim.SGD(plain, lr=0.1), plain),
        (windowed(optim.SGD(ours, lr=0.1), times=3), ours),
    ):
        train(optimizer, params, 0, 1)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, params, 2, 3)
    assert all(map(bitwise_equal, plain, ours))


@pytest.mark.parametrize("make", [optim.SGD, optim.RMSprop])
def test_momentum_that_is_turned_off_is_refused(make: Callable[..., Any]) -> None:
    params = parameters()
    optimizer = windowed(make(params, lr=0.1, momentum=0.9))
    train(optimizer, params, 0)
    optimizer.param_groups[0]["momentum"] = 0
    with pytest.raises(ConfigError, match="was changed after its state was made"):
        train(optimizer, params, 1)


def test_a_resumed_nadam_is_the_uninterrupted_one() -> None:
    whole, ours = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    train(optim.NAdam(whole), whole, *range(6))
    old = windowed(optim.NAdam(ours), times=2)
    train(old, ours, *range(3))
    saved = old.state_dict()
    new = windowed(optim.NAdam(ours), times=3)
    new.load_state_dict(saved)
    train(new, ours, *range(3, 6))
    assert all(map(bitwise_equal, whole, ours))


def test_a_gradient_of_a_convolution_of_one_pixel_is_not_copied() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last))
    other = torch.randn(8, 4, 1, 1)
    assert weight.stride() != other.stride()
    slot = Slot(weight, {}, "weight", (), master=False)
    assert flattened(other, slot).data_ptr() == other.data_ptr()
    assert bitwise_equal(flattened(other, slot), other.reshape(-1))
    tall = nn.Parameter(torch.randn(8, 4, 3, 1).to(memory_format=torch.channels_last))
    other = torch.randn(8, 4, 3, 1)
    copied = flattened(other, Slot(tall, {}, "weight", (), master=False))
    assert bitwise_equal(copied, other.permute(0, 2, 3, 1).reshape(-1))
