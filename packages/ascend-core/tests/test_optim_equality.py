"""Windows change nothing: every optimizer in every form equals the plain one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.errors import ConfigError
from ascend_core.optim import windowed
from ascend_core.testing import bitwise_equal

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
FORMS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "adamw": (optim.AdamW, {}),
    "adamw-amsgrad-maximize": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adam-decay": (optim.Adam, {"weight_decay": 0.1}),
    "sgd": (optim.SGD, {}),
    "sgd-momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd-nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adadelta": (optim.Adadelta, {}),
}
NOT_FUSED = ("rmsprop", "adamax", "nadam", "radam", "adadelta")
SIZES = [(1,), (7,), (), (0,), (3, 5), (4097,)]


def cases() -> Iterator[Any]:
    for name, (kind, options) in OPTIMIZERS.items():
        for form, flags in FORMS.items():
            if not (form == "fused" and name in NOT_FUSED):
                yield pytest.param(kind, {**options, **flags}, id=f"{name}-{form}")


def parameters(sizes: list[Any], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def train(
    params: list[nn.Parameter],
    optimizer: optim.Optimizer,
    *,
    steps: int,
    missing: tuple[int, ...] = (),
) -> None:
    """Step with a cosine schedule and clipping; `missing` have no gradient in the first steps."""
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    torch.manual_seed(1)
    for step in range(steps):
        for number, parameter in enumerate(params):
            gradient = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
            parameter.grad = None if step < 2 and number in missing else gradient
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def assert_same_state(plain: optim.Optimizer, other: optim.Optimizer) -> None:
    left, right = plain.state_dict(), other.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for key, state in left["state"].items():
        assert state.keys() == right["state"][key].keys()
        for name, value in state.items():
            assert bitwise_equal(value, right["state"][key][name].to(value.device)), (key, name)


@pytest.mark.parametrize("times", [1, 3, 16, 64])
@pytest.mark.parametrize(("kind", "options"), list(cases()))
def test_equal_to_the_plain_optimizer(
    kind: type[optim.Optimizer], options: dict[str, Any], times: int
) -> None:
    sizes = [*SIZES, (100, 64)]
    plain, ours = parameters(sizes), parameters(sizes)
    # (torch's fused SGD cannot begin with some parameters and go on with others.)
    missing = () if kind is optim.SGD and options.get("fused") else (1, 4)
    make: Any = kind
    left = make(plain, lr=1e-2, **options)
    right = windowed(make(ours, lr=1e-2, **options), times=times)
    train(plain, left, steps=6, missing=missing)
    train(ours, right, steps=6, missing=missing)
    assert all(map(bitwise_equal, plain, ours))
    assert_same_state(left, right)


@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_with_a_parameter_of_a_million_elements(form: str) -> None:
    sizes = [(1,), (7,), (4097,), (1_000_003,)]
    plain = parameters(sizes)
    train(plain, optim.AdamW(plain, lr=1e-2, **FORMS[form]), steps=20)
    for times in (1, 3, 16, 64):
        ours = parameters(sizes)
        train(ours, windowed(optim.AdamW(ours, lr=1e-2, **FORMS[form]), times=times), steps=20)
        assert all(map(bitwise_equal, plain, ours)), times


def test_lazily_negated_gradients_are_what_they_stand_for() -> None:
    plain, ours = parameters([(40, 50)]), parameters([(40, 50)])
    left, right = optim.AdamW(plain), windowed(optim.AdamW(ours))
    for parameter, optimizer in ((plain[0], left), (ours[0], right)):
        torch.manual_seed(2)
        parameter.grad = torch._neg_view(torch.randn(40, 50))
        optimizer.step()
    assert bitwise_equal(plain[0], ours[0])


def test_lazily_negated_parameters_are_refused() -> None:
    parameter = nn.Parameter(torch._neg_view(torch.ones(3)))
    parameter.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="cannot be stepped in windows"):
        windowed(optim.AdamW([parameter]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_other_dtypes_are_stepped_as_they_are(dtype: torch.dtype) -> None:
    plain, ours = parameters(SIZES, dtype), parameters(SIZES, dtype)
    train(plain, optim.AdamW(plain, lr=1e-2), steps=4)
    train(ours, windowed(optim.AdamW(ours, lr=1e-2), times=3), steps=4)
    assert all(map(bitwise_equal, plain, ours))


def test_memory_formats_are_kept() -> None:
    def make() -> list[nn.Parameter]:
        torch.manual_seed(0)
        images = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        return [nn.Parameter(images), nn.Parameter(torch.randn(9, 31).t())]

    plain, ours = make(), make()
    left, right = optim.AdamW(plain, fused=True), windowed(optim.AdamW(ours, fused=True), times=4)
    train(plain, left, steps=4)
    train(ours, right, steps=4)
    assert all(map(bitwise_equal, plain, ours))
    moment = right.state[ours[0]]["exp_avg"]
    assert moment.stride() == left.state[plain[0]]["exp_avg"].stride() == ours[0].stride()


def test_a_gradient_may_lie_in_memory_otherwise_than_its_parameter() -> None:
    # (Not fused: torch's fused kernel on the CPU takes the gradient for one of the same strides.)
    plain, ours = parameters([(40, 50)]), parameters([(40, 50)])
    left, right = optim.AdamW(plain), windowed(optim.AdamW(ours), times=3)
    for parameter, optimizer in ((plain[0], left), (ours[0], right)):
        torch.manual_seed(2)
        parameter.grad = torch.randn(50, 40).t()
        optimizer.step()
    assert bitwise_equal(plain[0], ours[0])


@pytest.mark.parametrize("times", [1, 3, 16])
def test_masters_do_not_depend_on_the_number_of_windows(times: int) -> None:
    sizes = [*SIZES, (1000,)]
    one, many = parameters(sizes, torch.bfloat16), parameters(sizes, torch.bfloat16)
    train(one, windowed(optim.AdamW(one, fused=True), master_weights=True), steps=5)
    optimizer = windowed(optim.AdamW(many, fused=True), master_weights=True, times=times)
    train(many, optimizer, steps=5)
    assert all(map(bitwise_equal, one, many))


def test_a_master_is_stepped_as_an_fp32_parameter_is() -> None:
    ours = parameters([(1000,)], torch.bfloat16)
    master = nn.Parameter(ours[0].detach().float())
    optimizer = windowed(optim.AdamW(ours, lr=1e-3), master_weights=True, times=5)
    plain = optim.AdamW([master], lr=1e-3)
    torch.manual_seed(1)
    for _ in range(5):
        gradient = torch.randn(1000).bfloat16()
        ours[0].grad, master.grad = gradient, gradient.float()
        optimizer.step()
        plain.step()
        assert bitwise_equal(ours[0], master.bfloat16())
    assert bitwise_equal(optimizer.state[ours[0]]["master_param"], master)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (optim.LBFGS, "inner products"),
        (optim.Muon, "orthogonalises"),
        (optim.Adafactor, "row and column sums"),
        (optim.SparseAdam, "sparse"),
        (optim.ASGD, "not known to work on each element"),
        (lambda p: optim.AdamW(p, differentiable=True), "autograd would hold"),
    ],
)
def test_what_is_not_elementwise_is_refused_by_name(make: Make, why: str) -> None:
    optimizer = make(parameters([(4, 4)]))
    name = type(optimizer).__name__
    with pytest.raises(ConfigError, match=why) as caught:
        windowed(optimizer)
    assert name in str(caught.value) or "differentiable" in str(caught.value)


def test_a_subclass_with_the_same_step_is_what_it_derives_from() -> None:
    class Mine(optim.AdamW):
        pass

    class Other(optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise AssertionError

    params = parameters([(100,)])
    assert isinstance(windowed(Mine(params)), Mine)
    with pytest.raises(ConfigError, match="Other cannot be stepped"):
        windowed(Other(params))
