"""The facade is a true optimizer: for schedulers, scalers, hooks, closures and wrappers."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ascend_core.errors import ConfigError, FeatureError
from ascend_core.memory import measure_peak
from ascend_core.optim import WindowedOptimizer, windowed
from ascend_core.testing import bitwise_equal


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def with_gradients(params: list[nn.Parameter], seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def assert_equal(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    assert all(map(bitwise_equal, left, right))


def test_it_is_an_instance_of_what_it_wraps() -> None:
    optimizer = windowed(optim.AdamW(parameters(3), lr=0.25))
    assert isinstance(optimizer, optim.Optimizer)
    assert isinstance(optimizer, optim.AdamW)
    assert isinstance(optimizer, WindowedOptimizer)
    assert optimizer.defaults["lr"] == 0.25
    assert "WindowedAdamW" in repr(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
)
def test_schedulers_reach_the_next_step(make: Callable[[Any], Any]) -> None:  # SO-01
    plain, ours = parameters(100, 5), parameters(100, 5)
    for params, optimizer in (
        (plain, optim.AdamW(plain)),
        (ours, windowed(optim.AdamW(ours), times=2)),
    ):
        schedule = make(optimizer)
        for step in range(6):
            with_gradients(params, step)
            optimizer.step()
            schedule.step()
    assert_equal(plain, ours)


def test_a_scheduler_of_the_wrapped_optimizer_reaches_it_too() -> None:
    params = parameters(10)
    inner = optim.AdamW(params, lr=1.0)
    optimizer = windowed(inner)
    inner.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_of_the_wrapped_optimizer_does_not_warn_of_its_order() -> None:
    params = parameters(10)
    inner = optim.AdamW(params, lr=1.0)
    schedule = lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = windowed(inner)
    with_gradients(params)
    optimizer.step()
    schedule.step()  # the tests make errors of warnings
    assert optimizer.param_groups[0]["lr"] == 0.5
    early = parameters(10)
    unstepped = optim.AdamW(early)
    schedule = lr_scheduler.StepLR(unstepped, 1)
    windowed(unstepped)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_frozen_parameters_are_ignored_and_may_be_unfrozen() -> None:  # SO-02
    plain, ours = parameters(70, 80), parameters(70, 80)
    for params, optimizer in (
        (plain, optim.AdamW(plain)),
        (ours, windowed(optim.AdamW(ours), times=2)),
    ):
        params[1].requires_grad_(False)
        for _ in range(2):
            with_gradients(params[:1])
            optimizer.step()
        assert params[1] not in optimizer.state
        params[1].requires_grad_(True)
        with_gradients(params)
        optimizer.step()
        assert optimizer.state[params[1]]["step"] == 1
    assert_equal(plain, ours)


def test_entries_of_param_groups_may_be_replaced() -> None:  # SO-05
    params = parameters(100, 7, dtype=torch.bfloat16)
    optimizer = windowed(optim.AdamW(params, lr=1e-2), times=2)
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            group["params"][i] = parameter.float().detach()
    wide = [nn.Parameter(p.detach().float()) for p in params]
    plain = optim.AdamW(wide, lr=1e-2)
    for step in range(3):
        with_gradients(wide, step)
        with_gradients(optimizer.param_groups[0]["params"], step)
        plain.step()
        optimizer.step()
    assert_equal(wide, optimizer.param_groups[0]["params"])


def test_a_replaced_parameter_takes_over_the_state() -> None:
    plain, ours = parameters(100), parameters(100)
    left, right = optim.AdamW(plain), windowed(optim.AdamW(ours), times=2)
    for optimizer, params in ((left, plain), (right, ours)):
        with_gradients(params)
        optimizer.step()
    new = nn.Parameter(ours[0].detach().clone())
    right.param_groups[0]["params"][0] = new
    for optimizer, params in ((left, plain), (right, [new])):
        with_gradients(params, 5)
        optimizer.step()
    assert_equal(plain, [new])


def test_a_stepped_parameter_cannot_be_replaced_by_another_form() -> None:
    ours = parameters(100)
    optimizer = windowed(optim.AdamW(ours))
    with_gradients(ours)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(50))
    with pytest.raises(ConfigError, match="does not fit its optimizer state"):
        optimizer.step()


@pytest.mark.parametrize("size", [(4, 4), (1, 8), (8,)])
def test_data_of_another_form_is_refused_by_name(size: tuple[int, ...]) -> None:
    ours = nn.Parameter(torch.ones(8, 8))
    optimizer = windowed(optim.AdamW([ours]))
    with_gradients([ours])
    optimizer.step()
    ours.data = torch.ones(size)
    ours.grad = None
    with_gradients([ours])
    with pytest.raises(ConfigError, match="does not fit its optimizer state"):
        optimizer.step()


def test_each_parameter_counts_its_own_steps() -> None:  # SO-14, SO-15, SO-16
    for times in (1, 3, 7):
        plain, ours = parameters(1000, 900), parameters(1000, 900)
        left, right = optim.AdamW(plain), windowed(optim.AdamW(ours), times=times)
        for step in range(5):
            for optimizer, params in ((left, plain), (right, ours)):
                with_gradients(params, step)
                if step in (0, 1):
                    params[1].grad = None
                if step == 3:
                    optimizer.param_groups[0]["betas"] = (0.8, 0.95)
                optimizer.step()
        assert_equal(plain, ours)
        assert right.state[ours[0]]["step"] == 5
        assert right.state[ours[1]]["step"] == 3


def test_clipping_counts_a_missing_gradient_as_none() -> None:  # SO-17
    plain, ours = parameters(100, 5, 70), parameters(100, 5, 70)
    left, right = optim.AdamW(plain), windowed(optim.AdamW(ours), times=3)
    with_gradients(plain)
    with_gradients(ours)
    plain[1].grad = ours[1].grad = None
    norm = nn.utils.clip_grad_norm_(plain, 0.5)
    assert bitwise_equal(norm, right.clip_grad_norm_(0.5))
    left.step()
    right.step()
    assert_equal(plain, ours)
    with_gradients(plain)
    with_gradients(ours)
    left.step()
    right.step()  # the clipping was for one step
    assert_equal(plain, ours)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_own_clipping_equals_torchs(norm_type: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = parameters(4097, 33, dtype=dtype), parameters(4097, 33, dtype=dtype)
        left, right = optim.AdamW(plain), windowed(optim.AdamW(ours), times=3)
        with_gradients(plain)
        with_gradients(ours)
        norm = nn.utils.clip_grad_norm_(plain, 0.1, norm_type)
        assert bitwise_equal(norm, right.clip_grad_norm_(0.1, norm_type))
        left.step()
        right.step()
        assert_equal(plain, ours)


def scaled_run(
    make: Callable[[list[nn.Parameter]], optim.Optimizer], *, unscale: bool
) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """Four steps under a scaler, the third with an infinite gradient."""
    params = parameters(200, 7)
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = sum((p * torch.randn(p.shape)).square().sum() for p in params)
        scaler.scale(loss).backward()
        if step == 2:
            assert params[0].grad is not None
            params[0].grad[3] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
        scaler.update()
    return params, optimizer


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_scaler_unscales_once_and_skips_a_step(  # SO-27
    form: dict[str, bool], unscale: bool
) -> None:
    plain, left = scaled_run(lambda p: optim.AdamW(p, lr=1e-2, **form), unscale=unscale)
    ours, right = scaled_run(
        lambda p: windowed(optim.AdamW(p, lr=1e-2, **form), times=3), unscale=unscale
    )
    assert_equal(plain, ours)
    for one, other in zip(plain, ours, strict=True):
        assert left.state[one]["step"] == right.state[other]["step"] == 3
        assert bitwise_equal(left.state[one]["exp_avg_sq"], right.state[other]["exp_avg_sq"])


@pytest.mark.parametrize("form", [{"foreach": False}, {"fused": True}])
def test_fp16_parameters_with_masters_under_a_scaler(form: dict[str, bool]) -> None:
    params = parameters(200, dtype=torch.float16)
    master = nn.Parameter(params[0].detach().float())
    optimizer = windowed(optim.AdamW(params, lr=1e-2, **form), times=2, master_weights=True)
    plain = optim.AdamW([master], lr=1e-2, **form)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(3):
        torch.manual_seed(step)
        gradient = torch.randn(200).half()
        scaler.scale(torch.ones(()))
        params[0].grad = gradient * 8
        norm = optimizer.clip_grad_norm_(0.5 * 8)
        scaler.step(optimizer)
        scaler.update()
        clip = torch.clamp(0.5 * 8 / (norm + 1e-6), max=1.0)
        master.grad = (gradient * 8 * clip).float() / 8
        plain.step()
        assert bitwise_equal(params[0], master.half())


def test_a_scaler_that_saw_no_gradient_is_refused() -> None:
    params = parameters(10)
    optimizer = windowed(optim.AdamW(params))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)  # nothing to do
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with_gradients(params)
    with pytest.raises(ConfigError, match="found no gradient to look at"):
        scaler.step(optimizer)


def test_a_closure_runs_with_grad_and_its_loss_is_returned() -> None:  # SO-33
    plain, ours = parameters(100), parameters(100)
    losses = []
    for params, optimizer in ((plain, optim.AdamW(plain)), (ours, windowed(optim.AdamW(ours)))):

        def closure(params: list[nn.Parameter] = params, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = params[0].square().sum()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure))
    assert bitwise_equal(*losses)
    assert_equal(plain, ours)


def test_hooks_run_once_per_step() -> None:
    params = parameters(1000)
    inner = optim.AdamW(params)
    calls: list[str] = []
    inner.register_step_post_hook(lambda *_: calls.append("post, of the wrapped one"))
    optimizer = windowed(inner, times=5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        with_gradients(params)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre", "post, of the wrapped one", "global post"]


def test_groups_may_be_added_later() -> None:
    plain, ours = parameters(300, 200), parameters(300, 200)
    for params, optimizer in (
        (plain, optim.AdamW(plain[:1], lr=1e-2)),
        (ours, windowed(optim.AdamW(ours[:1], lr=1e-2), times=2)),
    ):
        with_gradients(params)
        optimizer.step()
        optimizer.add_param_group({"params": params[1:], "lr": 1e-1})
        for step in range(2):
            with_gradients(params, step)
            optimizer.step()
    assert_equal(plain, ours)


def test_zero_grad_and_gradient_accumulation() -> None:
    plain, ours = parameters(100), parameters(100)
    for params, optimizer in ((plain, optim.AdamW(plain)), (ours, windowed(optim.AdamW(ours)))):
        for set_to_none in (True, False, True):
            for _ in range(3):
                params[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert (params[0].grad is None) is set_to_none
    assert_equal(plain, ours)


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps, copy.copy])
def test_copying_is_refused_by_name(copying: Callable[[Any], Any]) -> None:
    optimizer = windowed(optim.AdamW(parameters(3)))
    with pytest.raises(FeatureError, match="a windowed optimizer cannot be"):
        copying(optimizer)


def test_the_wrapped_optimizer_refuses_to_step_by_itself() -> None:
    params = parameters(3)
    inner = optim.AdamW(params)
    optimizer = windowed(inner)
    with_gradients(params)
    with pytest.raises(FeatureError, match="was wrapped, and its own step"):
        inner.step()
    optimizer.step()
    optimizer.remove()
    inner.step()


def test_the_wrapped_optimizer_says_when_the_windowed_one_is_gone() -> None:
    params = parameters(3)
    inner = optim.AdamW(params)
    windowed(inner)
    gc.collect()
    with_gradients(params)
    with pytest.raises(FeatureError, match="which is gone") as refusal:
        inner.step()
    assert "remove()" not in str(refusal.value)


def test_state_that_is_there_already_moves_in_and_out() -> None:
    plain, ours = parameters(300, 5), parameters(300, 5)
    left, inner = optim.AdamW(plain, lr=1e-2), optim.AdamW(ours, lr=1e-2)

    def step(optimizer: optim.Optimizer, params: list[nn.Parameter], seed: int) -> None:
        with_gradients(params, seed)
        optimizer.step()

    for seed in range(6):
        step(left, plain, seed)
    step(inner, ours, 0)
    step(inner, ours, 1)
    optimizer = windowed(inner, times=3)
    assert not inner.state
    step(optimizer, ours, 2)
    step(optimizer, ours, 3)
    optimizer.remove()
    optimizer.remove()
    step(inner, ours, 4)
    step(inner, ours, 5)
    assert_equal(plain, ours)
    with pytest.raises(FeatureError, match="was removed"):
        optimizer.step()


def test_a_tied_weight_has_one_state() -> None:  # SO-32
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = windowed(optim.AdamW(model.parameters()), times=2)
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0]
    optimizer.load_state_dict(saved)


def test_one_parameter_twice_is_refused() -> None:
    params = parameters(5)
    with pytest.warns(UserWarning, match="duplicate"):
        inner = optim.AdamW([params[0], params[0]])
    with pytest.raises(ConfigError, match="stepped twice"):
        windowed(inner).state_dict()
        with_gradients(params)
        windowed(inner).step()


def test_a_sparse_gradient_is_refused_and_nothing_is_stepped() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    other = nn.Parameter(torch.ones(4))
    before = embedding.weight.detach().clone()
    optimizer = windowed(optim.SGD([other, embedding.weight], lr=1.0, momentum=0.9))
    (embedding(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(ConfigError, match=r"gradient of layout torch\.sparse"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)
    assert torch.equal(other, torch.ones(4))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(10)[::2], "leave gaps"),
        (lambda: torch.ones(1).expand(4), "leave gaps"),
        (lambda: torch.ones(3, dtype=torch.complex64), "dtype is torch.complex64"),
    ],
)
def test_parameters_without_a_range_of_memory_are_refused(
    make: Callable[[], torch.Tensor], why: str
) -> None:
    parameter = nn.Parameter(make())
    optimizer = windowed(optim.AdamW([parameter]))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match=why):
        optimizer.step()


def test_an_option_that_changes_what_is_kept_is_refused() -> None:
    params = parameters(10)
    optimizer = windowed(optim.AdamW(params))
    with_gradients(params)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ConfigError, match="changed after its state was made"):
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{"times": 0}, {"times": 1.5}, {"window_bytes": -1}, {"times": True}, {"window_bytes": "1"}],
)
def test_a_wrong_size_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use a whole number above 0"):
        windowed(optim.AdamW(parameters(3)), **options)


def test_two_sizes_and_two_facades_are_refused() -> None:
    with pytest.raises(ConfigError, match="were both given"):
        windowed(optim.AdamW(parameters(3)), times=1, window_bytes=100)
    with pytest.raises(ConfigError, match="a windowed one already"):
        windowed(windowed(optim.AdamW(parameters(3))))


def test_window_bytes_bound_a_window() -> None:
    params = parameters(10_000)
    optimizer = windowed(optim.AdamW(params), window_bytes=8 * 1000)
    with_gradients(params)
    optimizer.step()
    assert optimizer.report()["windows"] == 11  # 8 bytes of moments an element; 960 on the grid


def test_a_weight_that_somebody_else_wrote_becomes_the_master() -> None:  # SO-09
    for write in (
        lambda p, x: p.data.copy_(x),
        lambda p, x: setattr(p, "data", x.clone()),
        lambda p, x: nn.utils.vector_to_parameters(x, [p]),
        lambda p, x: p.detach().copy_(x),
    ):
        params = parameters(1000, dtype=torch.bfloat16)
        optimizer = windowed(
            optim.AdamW(params, lr=0.0, weight_decay=0.0), master_weights=True, times=3
        )
        with_gradients(params)
        optimizer.step()
        new = torch.randn(1000).bfloat16()
        write(params[0], new)
        with_gradients(params)
        optimizer.step()
        assert bitwise_equal(params[0], new)
        assert bitwise_equal(optimizer.state[params[0]]["master_param"], new.float())


def test_a_flat_buffer_that_weights_alias_is_followed() -> None:
    flat = torch.randn(300).bfloat16()
    params = [nn.Parameter(flat[:200]), nn.Parameter(flat[200:])]
    optimizer = windowed(optim.AdamW(params, lr=0.0, weight_decay=0.0), master_weights=True)
    with_gradients(params)
    optimizer.step()
    flat.copy_(torch.randn(300))
    wanted = flat.clone()
    with_gradients(params)
    optimizer.step()
    assert bitwise_equal(flat, wanted)


def test_masters_keep_what_rounding_loses() -> None:
    params = parameters(1000, dtype=torch.bfloat16)
    optimizer = windowed(optim.AdamW(params, lr=1e-5), master_weights=True)
    before = params[0].detach().clone()
    for step in range(3):
        with_gradients(params, step)
        optimizer.step()
    master = optimizer.state[params[0]]["master_param"]
    assert bitwise_equal(params[0], master.bfloat16())
    assert not torch.equal(master, before.float())


def test_parameters_that_a_model_replaces_are_followed() -> None:
    plain, ours = nn.Linear(30, 20), nn.Linear(30, 20)
    ours.load_state_dict(plain.state_dict())
    saved = {name: value.clone() + 1 for name, value in plain.state_dict().items()}
    left = optim.AdamW(plain.parameters(), lr=1e-2)
    right = windowed(optim.AdamW(ours.parameters(), lr=1e-2), times=2)
    for model, optimizer, assign in ((plain, left, False), (ours, right, True)):
        model(torch.ones(3, 30)).square().mean().backward()
        optimizer.step()
        model.load_state_dict({name: value.clone() for name, value in saved.items()}, assign=assign)
        optimizer.zero_grad()
        model(torch.ones(3, 30)).square().mean().backward()
        optimizer.step()
    assert_equal(list(plain.parameters()), list(ours.parameters()))
    assert right.param_groups[0]["params"][0] is ours.weight


def test_a_tie_that_assigning_broke_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = windowed(optim.AdamW(model.parameters()))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    with pytest.raises(ConfigError, match="is not shared any more"):
        optimizer.step()
    model[1].weight = model[0].weight
    model(torch.arange(5)).square().mean().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_an_untied_copy_of_a_parameter_in_use_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    optimizer = windowed(optim.AdamW(model.parameters()))
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    model(torch.arange(5)).square().mean().backward()
    with pytest.raises(ConfigError, match="is not shared any more"):
        optimizer.step()


def test_modules_of_others_are_not_looked_at() -> None:
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    before = len(hooks)
    optimizer = windowed(optim.AdamW(parameters(5)))
    assert len(hooks) == before + 1
    nn.Linear(3, 3).weight = nn.Parameter(torch.ones(3, 3))
    optimizer.step()
    optimizer.remove()
    assert len(hooks) == before
    windowed(optim.AdamW(parameters(5)))
    gc.collect()
    assert len(hooks) == before


def test_nothing_is_left_when_it_is_dropped() -> None:
    params = parameters(100)
    optimizer = windowed(optim.AdamW(params))
    with_gradients(params)
    optimizer.step()
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_two_optimizers_do_not_meet() -> None:
    one, two, plain = parameters(100), parameters(100), parameters(100)
    first, second = windowed(optim.AdamW(one), times=2), windowed(optim.AdamW(two), times=3)
    left = optim.AdamW(plain)
    for step in range(3):
        for params, optimizer in ((one, first), (two, second), (plain, left)):
            with_gradients(params, step)
            optimizer.step()
    assert_equal(one, plain)
    assert_equal(two, plain)


def test_a_parameter_that_was_away_for_a_step_has_its_state_again() -> None:
    plain, ours = parameters(100, 50), parameters(100, 50)
    for params, optimizer in ((plain, optim.AdamW(plain)), (ours, windowed(optim.AdamW(ours)))):
        listed = optimizer.param_groups[0]["params"]
        for seed in range(3):
            with_gradients(params, seed)
            if seed == 1:
                listed.pop(0)
            if seed == 2:
                listed.insert(0, params[0])
            optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2
    assert_equal(plain, ours)


def test_a_new_group_inherits_nothing_from_one_that_was_removed() -> None:
    plain, ours = parameters(100, 50), parameters(100, 50)
    new = parameters(50), parameters(50)
    runs = (
        (plain, new[0], optim.AdamW([{"params": plain[:1]}, {"params": plain[1:]}])),
        (ours, new[1], windowed(optim.AdamW([{"params": ours[:1]}, {"params": ours[1:]}]))),
    )
    for params, added, optimizer in runs:
        with_gradients(params)
        optimizer.step()
        optimizer.param_groups.pop(1)
        optimizer.add_param_group({"params": added})
        with_gradients([params[0], *added], 2)
        optimizer.step()
    assert_equal(new[0], new[1])


def test_a_weight_that_was_tied_to_another_leaves_its_own_behind() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    optimizer = windowed(optim.AdamW([a.weight, b.weight]))
    b.weight = a.weight
    b(a(torch.ones(2, 3))).sum().backward()
    optimizer.step()
    assert list(optimizer.state) == [a.weight]


def test_the_state_takes_no_change_in_silence() -> None:
    params = parameters(5)
    optimizer = windowed(optim.AdamW(params))
    with_gradients(params)
    optimizer.step()
    unknown = nn.Parameter(torch.ones(1))

    def replace_by_union() -> None:
        state = optimizer.state
        state |= {}

    for change in (
        lambda: optimizer.state.pop(params[0]),
        lambda: operator.setitem(optimizer.state, params[0], {}),
        replace_by_union,
        lambda: operator.setitem(optimizer.state[params[0]], "step", torch.tensor(9.0)),
        lambda: optimizer.state[params[0]].update(step=torch.tensor(9.0)),
        lambda: operator.setitem(optimizer.state[unknown], "step", torch.tensor(9.0)),
    ):
        with pytest.raises(FeatureError, match="cannot be replaced entry by entry"):
            change()
    copied = copy.copy(optimizer.state[params[0]])
    assert type(copied) is dict and copied["step"] == 1
    copied["step"] = torch.tensor(9.0)
    optimizer.state[params[0]]["step"].fill_(5.0)
    assert optimizer.state[params[0]]["step"] == 5
    assert optimizer.state[unknown] == {}


def test_what_was_removed_or_wrapped_says_so() -> None:
    params = parameters(5)
    inner = optim.AdamW(params)
    optimizer = windowed(inner)
    with pytest.raises(ConfigError, match="was wrapped already"):
        windowed(inner)
    saved = optimizer.state_dict()
    optimizer.remove()
    for call in (
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.add_param_group({"params": parameters(3)}),
    ):
        with pytest.raises(FeatureError, match="was removed"):
            call()
    windowed(inner)


def test_a_step_count_that_is_no_number_is_refused_before_anything_is_loaded() -> None:
    params = parameters(5, 6)
    optimizer = windowed(optim.AdamW(params))
    with_gradients(params)
    optimizer.step()
    saved = optimizer.state_dict()
    # (Not copied as a whole: torch_npu's own deepcopy of a tensor warns.)
    saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
    saved["state"][0]["exp_avg"] = torch.zeros(5)
    saved["state"][1]["step"] = "many"
    before = optimizer.state[params[0]]["exp_avg"].clone()
    with pytest.raises(ConfigError, match="is no number"):
        optimizer.load_state_dict(saved)
    assert bitwise_equal(optimizer.state[params[0]]["exp_avg"], before)


def test_between_steps_nothing_but_weights_and_state_is_held() -> None:
    numel = 100_000
    with measure_peak("cpu") as memory:
        weight = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
        optimizer = windowed(optim.AdamW([weight]), master_weights=True)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    assert memory.held_bytes == (2 + 3 * 4) * numel + 4
    assert optimizer.report()["device_state_bytes"] == 12 * numel


def test_an_adamw_that_loads_an_adam_stays_decoupled() -> None:
    ends = []
    for wrap in (lambda optimizer: optimizer, windowed):
        adam_weights, weights = parameters(50), parameters(50)
        adam: Any = optim.Adam(adam_weights, weight_decay=0.1)
        adamw: Any = wrap(optim.AdamW(weights, weight_decay=0.1))
        for params, optimizer in ((adam_weights, adam), (weights, adamw)):
            params[0].grad = torch.ones(50)
            optimizer.step()
        adamw.load_state_dict(adam.state_dict())
        adamw.step()
        ends.append(weights[0])
    assert bitwise_equal(*ends)
