"""`offload_gradients`: what stands in `.grad` is the gradient, for whoever reads or drops it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core import ConfigError, FeatureError, PinnedPool
from ascend_core.memory import measure_peak
from ascend_core.testing import available_devices, bitwise_equal
from ascend_swap import SwapOptimizerConfig, swap_optimizer
from ascend_swap.host_gradient import HostGradient

OFFLOADING = SwapOptimizerConfig(offload_gradients=True, swap_optimizer_times=5)


@pytest.fixture(params=available_devices(), ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    found: torch.device = request.param
    return found


class Run:
    """Three parameters of two dtypes, and an optimizer that keeps their gradients on the host."""

    def __init__(self, device: torch.device, *, offload: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        shapes = [((40, 30), torch.bfloat16), ((4097,), torch.float32), ((7,), torch.float32)]
        self.device = device
        self.model = nn.ParameterList(torch.randn(s).to(d).to(device) for s, d in shapes)
        self.pool = PinnedPool()
        plain: Any = optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.optimizer = swap_optimizer(plain, OFFLOADING, pool=self.pool) if offload else plain
        self.state_bytes = self.pool.stats().in_use_bytes

    def backward(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), device=self.device)
        for parameter in self.model:
            drawn = torch.randn(parameter.shape, generator=generator).to(self.device)
            loss = loss + (parameter.float() * drawn).sum()
        loss.backward()

    def clip(self, *args: float) -> torch.Tensor:
        own = getattr(self.optimizer, "clip_grad_norm_", None)
        return own(*args) if own else nn.utils.clip_grad_norm_(list(self.model), *args)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model if parameter.grad is not None]

    def host_bytes(self) -> int:
        return self.pool.stats().in_use_bytes - self.state_bytes


def assert_same(act: Callable[[Run], Any], device: torch.device, **options: Any) -> Run:
    """Whatever is done to both, plain and offloading step to the same weights."""
    plain, ours = Run(device, offload=False, **options), Run(device, **options)
    seen, own = act(plain), act(ours)
    for run in (plain, ours):
        run.optimizer.step()
    assert all(map(bitwise_equal, plain.model, ours.model))
    assert all(map(bitwise_equal, seen or (), own or ()))
    return ours


def accumulate(run: Run) -> None:
    for seed in range(3):
        run.backward(seed)


def test_gradients_are_on_the_host_and_read_as_they_are(device: torch.device) -> None:
    plain, ours = Run(device, offload=False), Run(device)
    for run in (plain, ours):
        accumulate(run)
    assert 2 * 1200 + 4 * 4104 <= ours.host_bytes() < 2 * 1200 + 4 * 4104 + 3 * 64
    for left, right in zip(plain.gradients(), ours.gradients(), strict=True):
        assert isinstance(right, HostGradient)
        assert (right.shape, right.dtype, right.device) == (left.shape, left.dtype, left.device)
        assert bitwise_equal(left, right.clone())
        assert bitwise_equal(left.abs(), right.abs())
        assert bitwise_equal(left.double(), right.double())
        assert bitwise_equal(left.square().sum(), right.detach().square().sum())
        assert "HostGradient" in repr(right)


def drop_by_model(run: Run) -> None:
    run.model.zero_grad()


def drop_by_attribute(run: Run) -> None:
    for parameter in run.model:
        parameter.grad = None


def drop_by_optimizer(run: Run) -> None:
    run.optimizer.zero_grad()


def zero_by_model(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def zero_by_optimizer(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def zero_each(run: Run) -> None:
    for gradient in run.gradients():
        gradient.zero_()


DROPS = [drop_by_model, drop_by_attribute, drop_by_optimizer]
ZEROS = [zero_by_model, zero_by_optimizer, zero_each]


@pytest.mark.parametrize("drop", [*DROPS, *ZEROS])
def test_what_is_dropped_or_zeroed_is_not_stepped(
    drop: Callable[[Run], None], device: torch.device
) -> None:
    def act(run: Run) -> None:
        accumulate(run)
        run.clip(0.1)
        drop(run)
        run.backward(7)

    assert_same(act, device)


@pytest.mark.parametrize("drop", DROPS)
def test_host_memory_goes_when_the_gradient_is_dropped(drop: Callable[[Run], None]) -> None:
    run = Run(torch.device("cpu"))
    accumulate(run)
    assert run.host_bytes() > 0
    drop(run)
    assert run.host_bytes() == 0
    before = [parameter.detach().clone() for parameter in run.model]
    run.optimizer.step()
    assert all(map(bitwise_equal, before, run.model))


def test_a_gradient_that_is_put_there_replaces_the_sum(device: torch.device) -> None:
    def act(run: Run) -> None:
        accumulate(run)
        for parameter in run.model:
            parameter.grad = torch.ones_like(parameter)

    assert_same(act, device)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clips_follow_one_another(norm_type: float, device: torch.device) -> None:
    def act(run: Run) -> list[torch.Tensor]:
        accumulate(run)
        norms = [run.clip(1.0, norm_type), run.clip(0.3)]
        run.backward(9)
        return [*norms, run.clip(0.7), *(g.clone() for g in run.gradients())]

    assert_same(act, device)


def test_torchs_own_functions_write_to_it(device: torch.device) -> None:
    def act(run: Run) -> list[torch.Tensor]:
        accumulate(run)
        nn.utils.clip_grad_value_(list(run.model), 0.5)
        for gradient in run.gradients():
            gradient.mul_(0.5)
            gradient.add_(torch.ones_like(gradient), alpha=2)
            gradient.copy_(gradient * gradient)
        torch._foreach_mul_(run.gradients(), 0.25)
        torch._foreach_add_(run.gradients(), 1.0)
        return torch._foreach_norm(run.gradients())

    assert_same(act, device)


def test_torchs_own_clipping_finds_the_gradients(device: torch.device) -> None:
    run = Run(device)
    accumulate(run)
    before = [gradient.clone() for gradient in run.gradients()]
    norm = nn.utils.clip_grad_norm_(list(run.model), 0.5)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(before))
    factor = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
    for old, new in zip(before, run.gradients(), strict=True):
        assert bitwise_equal(old.mul_(factor), new.clone())


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_finds_the_gradients(
    unscale: bool, form: dict[str, bool], device: torch.device
) -> None:
    runs = Run(device, offload=False, **form), Run(device, **form)
    for run in runs:
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        for step in range(3):
            scaler.scale(torch.zeros((), device=device))
            run.backward(step)
            if step == 1:
                run.gradients()[1].mul_(float("inf"))
            if unscale:
                scaler.unscale_(run.optimizer)
                run.clip(0.5)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
    assert all(map(bitwise_equal, runs[0].model, runs[1].model))


@pytest.mark.parametrize(
    "view", [lambda g: g.view(-1), lambda g: g[0], lambda g: g.t_(), lambda g: g.flatten()]
)
def test_views_are_refused(view: Callable[[torch.Tensor], Any]) -> None:
    run = Run(torch.device("cpu"))
    accumulate(run)
    with pytest.raises(FeatureError, match="called on a gradient that is on the host"):
        view(run.gradients()[0])
    view(run.gradients()[0].clone())


def test_data_and_detach_are_the_gradient_itself() -> None:
    def act(run: Run) -> None:
        accumulate(run)
        for gradient in run.gradients():
            gradient.data.mul_(0.5)
            gradient.detach().add_(1)

    assert_same(act, torch.device("cpu"))


def test_a_hook_that_comes_later_sees_the_gradient() -> None:
    run = Run(torch.device("cpu"))
    seen: list[torch.Tensor] = []
    first = run.model[0]
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run.backward()
    run.backward()
    assert bitwise_equal(seen[1], seen[0] * 2)


def test_second_derivatives_accumulate() -> None:
    def act(run: Run) -> None:
        run.backward()
        loss = sum(parameter.float().square().sum() for parameter in run.model)
        gradients = torch.autograd.grad(loss, list(run.model), create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()

    assert_same(act, torch.device("cpu"))


def test_two_optimizers_may_not_take_the_same_gradient() -> None:
    run, other = Run(torch.device("cpu")), nn.Parameter(torch.ones(3))
    shared = list(run.model)[1]
    with pytest.raises(ConfigError, match="is moved to the host by another optimizer"):
        swap_optimizer(optim.SGD([other, shared]), OFFLOADING)
    gc.collect()
    assert not other._post_accumulate_grad_hooks
    mine = swap_optimizer(optim.SGD([other]), OFFLOADING)
    with pytest.raises(ConfigError, match="is moved to the host by another optimizer"):
        mine.add_param_group({"params": [shared]})
    assert len(mine.param_groups) == 1
    run.optimizer.remove()
    mine.add_param_group({"params": [shared]})


def test_the_hooks_go_with_the_optimizer_and_gradients_stay() -> None:
    run = Run(torch.device("cpu"))
    accumulate(run)
    gone = weakref.ref(run.optimizer)
    run.optimizer = None
    gc.collect()
    assert gone() is None
    assert not any(p._post_accumulate_grad_hooks for p in run.model)
    plain = Run(torch.device("cpu"), offload=False)
    accumulate(plain)
    for each in (plain, run):
        each.backward(5)
    assert all(map(bitwise_equal, plain.gradients(), (g.clone() for g in run.gradients())))
    optim.AdamW(run.model.parameters(), lr=1e-2).step()
    plain.optimizer.step()
    assert all(map(bitwise_equal, plain.model, run.model))


def test_removing_brings_them_back(device: torch.device) -> None:
    plain, ours = Run(device, offload=False), Run(device)
    for run in (plain, ours):
        accumulate(run)
        run.clip(0.5)
    ours.optimizer.remove()
    assert all(type(gradient) is torch.Tensor for gradient in ours.gradients())
    assert all(map(bitwise_equal, plain.gradients(), ours.gradients()))
    assert ours.host_bytes() == -ours.state_bytes


def test_no_gradient_takes_memory_of_the_device() -> None:
    run = Run(torch.device("cpu"))
    accumulate(run)
    with measure_peak("cpu") as memory:
        held = [HostGradient(g.host) for g in run.gradients() for _ in range(100)]
    assert memory.peak_bytes == 0
    assert len(held) == 300
    with pytest.raises(RuntimeError, match="invalid python storage"):
        held[0].untyped_storage().data_ptr()
