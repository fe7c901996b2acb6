"""swap-optimizer on every device: equal to the plain optimizer, in any number of windows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core import BudgetExceededError, ConfigError, HostMemoryError, PinnedPool, windowed
from ascend_core.testing import (
    assert_bitwise_equal,
    available_devices,
    bitwise_equal,
    record_run,
)
from ascend_swap import SwapOptimizerConfig, swap_optimizer
from ascend_swap._stores import DiskStore
from ascend_swap.host_gradient import HostGradient

FORMS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.fixture(params=available_devices(), ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


class Model(nn.Module):
    """A tied, partly frozen model with dropout; parameters of 7, 64, 4097 elements and more."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.up = nn.Linear(16, 241)
        self.down = nn.Linear(241, 16)
        self.head = nn.Linear(16, 7, bias=True)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.frozen
        x = nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1)
        found: torch.Tensor = self.head(x)
        return found


def batch(number: int) -> torch.Tensor:
    return (torch.arange(12) + number) % 7


def adamw(**options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: optim.AdamW(model.parameters(), lr=1e-2, **options)


def swapped(
    make: Callable[[nn.Module], optim.Optimizer], **options: Any
) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: swap_optimizer(make(model), SwapOptimizerConfig(**options))


@pytest.mark.parametrize("times", [1, 3, 16, 64])
@pytest.mark.parametrize("form", FORMS)
def test_training_is_equal_to_the_plain_optimizer(
    form: str, times: int, device: torch.device
) -> None:
    make = adamw(**FORMS[form])
    plain = record_run(Model, batch, make_optimizer=make, accumulate=2, device=device)
    ours = record_run(
        Model,
        batch,
        make_optimizer=swapped(make, swap_optimizer_times=times),
        accumulate=2,
        device=device,
    )
    assert_bitwise_equal(plain, ours)


@pytest.mark.parametrize("options", [{}, {"release_grads": True}, {"offload_gradients": True}])
def test_masters_are_equal_wherever_they_live(
    options: dict[str, bool], device: torch.device
) -> None:
    def make_model() -> Model:
        return Model(torch.bfloat16)

    def resident(model: nn.Module) -> optim.Optimizer:
        return windowed(adamw()(model), master_weights=True)

    ours = swapped(adamw(), master_weights=True, window_bytes=6000, **options)
    runs = [
        record_run(make_model, batch, make_optimizer=make, device=device)
        for make in (resident, ours)
    ]
    for left, right in zip(runs[0].steps, runs[1].steps, strict=True):
        for name, weight in left.weights.items():
            assert bitwise_equal(weight, right.weights[name])


def test_gradients_on_the_host_add_up(device: torch.device) -> None:  # SO-04, SO-18
    def train(wrap: Callable[[optim.Optimizer], Any]) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        model = Model().to(device).eval()
        optimizer = wrap(optim.AdamW(model.parameters(), lr=1e-2))
        norms = []
        for step in range(3):
            for micro in range(3):
                torch.autograd.backward(model(batch(step + micro).to(device)).square().mean())
            if hasattr(optimizer, "clip_grad_norm_"):
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                assert all(isinstance(gradient, HostGradient) for gradient in gradients)
                norms.append(optimizer.clip_grad_norm_(0.5))
            else:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], norms

    plain = train(lambda optimizer: optimizer)
    config = SwapOptimizerConfig(offload_gradients=True, swap_optimizer_times=5)
    ours = train(lambda optimizer: swap_optimizer(optimizer, config))
    for left, right in zip(plain, ours, strict=True):
        assert all(map(bitwise_equal, left, right))


def test_gradients_on_the_host_may_be_set_to_zero_or_dropped() -> None:
    weight = nn.Parameter(torch.ones(10))
    config = SwapOptimizerConfig(offload_gradients=True)
    optimizer = swap_optimizer(optim.SGD([weight], lr=1.0, momentum=0.9), config)
    weight.sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weight, torch.ones(10))
    weight.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.zeros(10))
    weight.sum().backward()
    optimizer.remove()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(10))


def test_released_gradients_are_gone_after_the_step() -> None:
    params = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(5))]
    config = SwapOptimizerConfig(release_grads=True, swap_optimizer_times=4)
    optimizer = swap_optimizer(optim.AdamW(params), config)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(parameter.grad is None for parameter in params)


def test_the_disk_tier_is_equal_and_leaves_nothing_behind(tmp_path: Path) -> None:
    plain = record_run(Model, batch, make_optimizer=adamw(fused=True))
    ours = record_run(Model, batch, make_optimizer=swapped(adamw(fused=True), disk=tmp_path))
    assert_bitwise_equal(plain, ours)
    assert list(tmp_path.iterdir()) == []


def test_the_state_is_on_the_host_and_nowhere_else(device: torch.device) -> None:  # SO-23, SO-24
    model = Model().to(device)
    optimizer = swap_optimizer(adamw(fused=True)(model))
    torch.autograd.backward(model(batch(0).to(device)).square().mean())
    optimizer.step()
    for _ in range(2):
        for state in optimizer.state_dict()["state"].values():
            assert {value.device.type for value in state.values()} == {"cpu"}
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    report = optimizer.report()
    assert report["device_state_bytes"] == 0
    assert 8 * numel <= report["host_state_bytes"] <= 8 * numel + 8 * 64 * 6 + 4 * 200
    assert report["optimizer"] == "AdamW"


def train_on(optimizer: optim.Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        for parameter in params:
            gradient = torch.randn(parameter.shape)
            parameter.grad = gradient.to(parameter.dtype).to(parameter.device)
        optimizer.step()


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    sizes = [(1,), (7,), (40, 30), (4097,)]
    return [nn.Parameter(torch.randn(size).to(dtype).to(device)) for size in sizes]


def through_a_file(saved: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_unchanged(optimizer: optim.Optimizer, before: dict[str, Any]) -> None:
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(bitwise_equal(state[name], now["state"][key][name]) for name in state)


WRAPS: dict[str, Callable[[optim.Optimizer], optim.Optimizer]] = {
    "plain": lambda optimizer: optimizer,
    "resident": lambda optimizer: windowed(optimizer, times=2),
    "swap-1": lambda optimizer: swap_optimizer(
        optimizer, SwapOptimizerConfig(swap_optimizer_times=1)
    ),
    "swap-7": lambda optimizer: swap_optimizer(
        optimizer, SwapOptimizerConfig(swap_optimizer_times=7)
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", WRAPS)
@pytest.mark.parametrize("before", WRAPS)
def test_resume_under_a_changed_plan(  # SO-07, SO-13
    before: str, after: str, form: str, device: torch.device
) -> None:
    whole, first = parameters(device), parameters(device)
    train_on(optim.AdamW(whole, lr=1e-2, **FORMS[form]), whole, range(8))
    old = WRAPS[before](optim.AdamW(first, lr=1e-2, **FORMS[form]))
    train_on(old, first, range(5))
    saved = through_a_file(old.state_dict())
    second = [nn.Parameter(p.detach().clone()) for p in first]
    new = WRAPS[after](optim.AdamW(second, lr=1e-2, **FORMS[form]))
    train_on(new, [nn.Parameter(p.detach().clone()) for p in second], range(2))
    train_on(new, second, range(2))
    with torch.no_grad():
        for target, source in zip(second, first, strict=True):
            target.copy_(source)
    new.load_state_dict(saved)
    train_on(new, second, range(5, 8))
    assert all(map(bitwise_equal, whole, second))
    assert new.state[second[0]]["step"] == 8


def test_masters_resume(device: torch.device) -> None:
    config = SwapOptimizerConfig(master_weights=True, swap_optimizer_times=3)
    whole, first = parameters(device, torch.bfloat16), parameters(device, torch.bfloat16)
    train_on(swap_optimizer(optim.AdamW(whole, lr=1e-4), config), whole, range(6))
    old = swap_optimizer(optim.AdamW(first, lr=1e-4), config)
    train_on(old, first, range(3))
    saved = through_a_file(old.state_dict())
    assert saved["state"][3]["exp_avg"].dtype == torch.float32
    new = windowed(optim.AdamW(first, lr=1e-4), master_weights=True)
    new.load_state_dict(saved)
    train_on(new, first, range(3, 6))
    assert all(map(bitwise_equal, whole, first))


def test_state_is_loaded_onto_the_right_parameters() -> None:  # SO-06, SO-28
    dtypes = [torch.float32, torch.bfloat16, torch.float32]

    def make() -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(100).to(dtype)) for dtype in dtypes]

    config = SwapOptimizerConfig(master_weights=True, swap_optimizer_times=2)
    old, new = make(), make()
    left = swap_optimizer(optim.AdamW(old), config)
    train_on(left, old, range(3))
    right = swap_optimizer(optim.AdamW(new), config)
    right.load_state_dict(through_a_file(left.state_dict()))
    for one, other in zip(old, new, strict=True):
        a, b = left.state[one], right.state[other]
        assert a.keys() == b.keys()
        assert all(bitwise_equal(a[name], b[name]) for name in a)
    assert [("master_param" in right.state[p]) for p in new] == [False, True, False]


def test_all_rounded_weights_equal_their_masters() -> None:  # SO-26
    params = [nn.Parameter(torch.randn(n).bfloat16()) for n in (50, 60, 70, 80, 90)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-4}]
    optimizer = swap_optimizer(optim.AdamW(groups), SwapOptimizerConfig(master_weights=True))
    train_on(optimizer, params, range(3))
    for parameter in params:
        assert bitwise_equal(parameter, optimizer.state[parameter]["master_param"].bfloat16())


def test_steps_may_be_numbers_in_a_checkpoint() -> None:  # SO-22
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params))
    train_on(optimizer, params, range(2))
    saved = through_a_file(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    optimizer.load_state_dict(saved)
    assert all(torch.is_tensor(optimizer.state[p]["step"]) for p in params)
    assert all(optimizer.state[p]["step"] == 2 for p in params)


def test_before_the_first_step_there_is_no_state() -> None:  # SO-35
    params, plain = parameters(torch.device("cpu")), parameters(torch.device("cpu"))
    optimizer, left = swap_optimizer(optim.AdamW(params)), optim.AdamW(plain)
    assert optimizer.state_dict() == left.state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.state
    train_on(optimizer, params, range(2))
    train_on(left, plain, range(2))
    assert all(map(bitwise_equal, params, plain))


def test_options_of_a_checkpoint_may_change_what_is_kept() -> None:
    plain, ours = parameters(torch.device("cpu")), parameters(torch.device("cpu"))
    left = optim.AdamW(plain, amsgrad=True, fused=True)
    train_on(left, plain, range(2))
    right = swap_optimizer(optim.AdamW(ours))
    with torch.no_grad():
        for target, source in zip(ours, plain, strict=True):
            target.copy_(source)
    right.load_state_dict(left.state_dict())
    train_on(left, plain, range(2, 4))
    train_on(right, ours, range(2, 4))
    assert all(map(bitwise_equal, plain, ours))
    assert "max_exp_avg_sq" in right.state[ours[0]]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda s: s["param_groups"].append(s["param_groups"][0]), "has groups of"),
        (lambda s: s["state"][3].pop("exp_avg"), "is that of another optimizer"),
        (lambda s: s["state"][3].update(momentum_buffer=None), "is that of another optimizer"),
        (lambda s: s["state"][3].update(exp_avg=torch.ones(3)), r"is \[3\], and the parameter is"),
        (lambda s: s["state"][3].update(exp_avg=1.0), "is float, and the parameter is"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    spoil: Callable[[Any], Any], why: str
) -> None:
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params, lr=0.5))
    train_on(optimizer, params, range(2))
    before = through_a_file(optimizer.state_dict())
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    spoil(saved)
    with pytest.raises(ConfigError, match=why):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


def test_a_checkpoint_with_other_options_that_does_not_fit_changes_nothing() -> None:
    plain, ours = parameters(torch.device("cpu")), parameters(torch.device("cpu"))
    left, right = optim.AdamW(plain, amsgrad=True), swap_optimizer(optim.AdamW(ours))
    train_on(left, plain, range(2))
    train_on(right, ours, range(2))
    before = through_a_file(right.state_dict())
    saved = through_a_file(left.state_dict())
    saved["state"][3]["max_exp_avg_sq"] = torch.ones(3)
    with pytest.raises(ConfigError, match="max_exp_avg_sq"):
        right.load_state_dict(saved)
    assert_unchanged(right, before)


def test_a_model_that_was_converted_after_a_step_is_refused() -> None:
    model = nn.Linear(10, 10)
    optimizer = swap_optimizer(optim.AdamW(model.parameters()))
    model.bfloat16()  # before the first step this is no loss
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 10).bfloat16()).float().sum())
        optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.bfloat16
    model.float()
    optimizer.zero_grad()
    torch.autograd.backward(model(torch.ones(2, 10)).sum())
    with pytest.raises(ConfigError, match="does not fit its optimizer state"):
        optimizer.step()


def test_a_budget_that_is_too_small_is_found_before_anything_moves() -> None:
    params = parameters(torch.device("cpu"))
    inner = optim.AdamW(params)
    train_on(inner, params, range(1))
    with pytest.raises(
        BudgetExceededError, match=r"state needs \d+ bytes of host memory"
    ) as caught:
        swap_optimizer(inner, SwapOptimizerConfig(host_budget_bytes=20_000))
    assert "raise host_budget_bytes" in str(caught.value)
    assert set(inner.state) == set(params)
    train_on(inner, params, range(1))


def test_a_shared_pool_has_its_memory_back_after_remove() -> None:
    pool = PinnedPool(10_000_000)
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params), pool=pool)
    train_on(optimizer, params, range(1))
    assert pool.stats().in_use_bytes > 8 * 5305
    optimizer.remove()
    assert pool.stats().in_use_bytes == 0


def test_a_disk_without_room_or_folder_is_refused(tmp_path: Path) -> None:
    params = parameters(torch.device("cpu"))
    with pytest.raises(ConfigError, match="no such folder"):
        swap_optimizer(optim.AdamW(params), SwapOptimizerConfig(disk=tmp_path / "nowhere"))
    with pytest.raises(BudgetExceededError, match="bytes on disk"):
        swap_optimizer(
            optim.AdamW(params), SwapOptimizerConfig(disk=tmp_path, host_budget_bytes=1000)
        )
    with pytest.raises(HostMemoryError, match="has no room for it"):
        DiskStore(tmp_path).lease([4096, 1 << 60])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"swap_optimizer_times": 0},
        {"swap_optimizer_times": True},
        {"swap_optimizer_times": 2.0},
        {"window_bytes": 0},
        {"host_budget_bytes": -1},
        {"master_weights": 1},
        {"release_grads": "yes"},
        {"offload_gradients": None},
        {"disk": 3},
        {"swap_optimizer_times": 4, "window_bytes": 100},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SwapOptimizerConfig(**options)


def test_wrong_arguments_are_refused() -> None:
    optimizer: Any = optim.AdamW(parameters(torch.device("cpu")))
    wrong: Any = {"swap_optimizer_times": 4}
    with pytest.raises(ConfigError, match="was given a dict as its config"):
        swap_optimizer(optimizer, wrong)
    with pytest.raises(ConfigError, match="was given a list"):
        swap_optimizer(optimizer.param_groups)


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("after", FORMS)
def test_a_checkpoint_of_another_form_is_loaded(
    before: str, after: str, device: torch.device
) -> None:
    plain, ours = parameters(device), parameters(device)
    left = optim.AdamW(plain, lr=1e-2, **FORMS[before])
    train_on(left, plain, range(2))
    right = swap_optimizer(optim.AdamW(ours, lr=1e-2, **FORMS[after]))
    train_on(right, ours, range(3))
    with torch.no_grad():
        for target, source in zip(ours, plain, strict=True):
            target.copy_(source)
    right.load_state_dict(through_a_file(left.state_dict()))
    train_on(left, plain, range(2, 4))
    train_on(right, ours, range(2, 4))
    assert all(map(bitwise_equal, plain, ours))


def test_a_form_that_is_changed_after_a_step_is_refused_and_nothing_is_lost() -> None:
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params, fused=True))
    train_on(optimizer, params, range(1))
    optimizer.param_groups[0]["fused"] = False
    with pytest.raises(ConfigError, match="was changed after its state was made"):
        train_on(optimizer, params, range(1))
    optimizer.param_groups[0]["fused"] = True
    train_on(optimizer, params, range(1))
    assert optimizer.state[params[0]]["step"] == 2


def test_options_may_change_before_the_first_step() -> None:
    plain, ours = parameters(torch.device("cpu")), parameters(torch.device("cpu"))
    runs = ((plain, optim.SGD(plain, lr=0.1)), (ours, swap_optimizer(optim.SGD(ours, lr=0.1))))
    for params, optimizer in runs:
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        for seed in range(3):
            train_on(optimizer, params, range(seed, seed + 1))
            schedule.step()
    assert all(map(bitwise_equal, plain, ours))


def test_after_remove_bf16_parameters_are_stepped_again() -> None:
    params = parameters(torch.device("cpu"), torch.bfloat16)
    inner = optim.AdamW(params)
    optimizer = swap_optimizer(inner, SwapOptimizerConfig(master_weights=True))
    train_on(optimizer, params, range(2))
    optimizer.remove()
    train_on(inner, params, range(1))
    assert inner.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_a_checkpoint_file_holds_the_state_and_no_more() -> None:
    pool = PinnedPool()
    other = pool.allocate(1 << 20)
    other.tensor.fill_(7)
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params), pool=pool)
    train_on(optimizer, params, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 8 * 5305 + 20_000


def test_a_first_group_may_be_empty() -> None:
    params = parameters(torch.device("cpu"))
    swap_optimizer(optim.AdamW([{"params": []}, {"params": params}]))


def test_the_budget_that_is_named_is_enough() -> None:
    params = parameters(torch.device("cpu"))
    with pytest.raises(BudgetExceededError) as caught:
        swap_optimizer(optim.AdamW(params), SwapOptimizerConfig(host_budget_bytes=1000))
    named = re.search(r"raise host_budget_bytes to (\d+)", str(caught.value))
    assert named is not None
    config = SwapOptimizerConfig(host_budget_bytes=int(named[1]))
    optimizer = swap_optimizer(optim.AdamW(params), config)
    assert optimizer.report()["host_reserved_bytes"] <= int(named[1])


def test_a_folder_that_takes_no_files_is_named() -> None:
    with pytest.raises(ConfigError, match="no file for the state can be made there"):
        swap_optimizer(
            optim.AdamW(parameters(torch.device("cpu"))), SwapOptimizerConfig(disk="/proc")
        )


def test_a_home_folder_may_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "state").mkdir()
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW(params), SwapOptimizerConfig(disk="~/state"))
    train_on(optimizer, params, range(1))


def test_a_frozen_first_parameter_may_be_anywhere() -> None:
    frozen = nn.Parameter(torch.empty(5, device="meta"), requires_grad=False)
    params = parameters(torch.device("cpu"))
    optimizer = swap_optimizer(optim.AdamW([frozen, *params]))
    plain = parameters(torch.device("cpu"))
    train_on(optimizer, params, range(2))
    train_on(optim.AdamW(plain), plain, range(2))
    assert all(map(bitwise_equal, plain, params))
