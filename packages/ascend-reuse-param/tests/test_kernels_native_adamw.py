"""The native step equals torch's for-loop on FP32 masters, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import Parts, Rounding
from ascend_reuse_param._kernels import native_adamw
from ascend_reuse_param._kernels.adamw import AdamWOptions, Moments
from ascend_reuse_param._kernels.native import Library, NativeCodec
from ascend_reuse_param._kernels.native_adamw import NativeAdamW

SIZES = (1, 7, 63, 64, 65, 4097, 1_000_003)
Gradients = Callable[[int], torch.Tensor]


class Both:
    """A parameter that is stepped by torch as FP32, and natively as BF16 and its parts."""

    def __init__(
        self, numel: int, rounding: Rounding = "nearest-even", *, amsgrad: bool = False, **rest: Any
    ) -> None:
        generator = torch.Generator().manual_seed(numel)
        self.master = nn.Parameter(torch.randn(numel, generator=generator) / 10)
        decoupled = rest.get("decoupled", True)
        self.options = AdamWOptions(**{"lr": 1e-3, **rest})
        of_torch = {key: value for key, value in rest.items() if key != "decoupled"}
        make = optim.AdamW if decoupled else optim.Adam
        self.torch = make(
            [self.master],
            foreach=False,
            fused=False,
            amsgrad=amsgrad,
            **{"lr": 1e-3, "weight_decay": 0.01, **of_torch},
        )
        self.weight = torch.empty(numel, dtype=torch.bfloat16)
        self.parts = Parts.empty(numel, self.weight.device, rounding)
        self.moments = Moments(*[torch.zeros(numel) for _ in range(3 if amsgrad else 2)])
        self.library = Library()
        self.native = NativeAdamW(rounding, library=self.library)
        self.codec = NativeCodec(rounding, library=self.library)
        self.scratch = Arena(0, self.weight.device)
        self.codec.split(self.master.data, self.weight, self.parts, self.scratch)
        self.steps = 0

    def step(self, gradient: torch.Tensor, factor: float = 1.0) -> None:
        self.steps += 1
        self.master.grad = gradient.float() * factor
        self.torch.step()
        self.native.step(
            self.weight,
            self.parts,
            gradient,
            self.moments,
            step=self.steps,
            options=self.options,
            gradient_factor=factor,
        )

    def assert_equal(self) -> None:
        joined = torch.empty_like(self.master.data)
        self.codec.join(self.weight, self.parts, joined, self.scratch)
        assert torch.equal(joined.view(torch.int32), self.master.data.view(torch.int32))
        state = self.torch.state[self.master]
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            if name in state:
                ours = getattr(self.moments, name)
                assert torch.equal(ours.view(torch.int32), state[name].view(torch.int32)), name


def gradients(numel: int, dtype: torch.dtype = torch.bfloat16) -> Gradients:
    generator = torch.Generator().manual_seed(1)
    return lambda step: torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("numel", SIZES)
def test_a_hundred_steps_equal_torchs_for_loop(numel: int) -> None:
    both, gradient = Both(numel), gradients(numel)
    for step in range(100):
        both.step(gradient(step))
    both.assert_equal()


OPTIONS: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "Adam": {"decoupled": False},
    "Adam without decay": {"decoupled": False, "weight_decay": 0.0},
    "without decay": {"weight_decay": 0.0},
    "fast averages": {"betas": (0.3, 0.5), "eps": 1e-3, "lr": 0.3},
    "no averages": {"betas": (0.0, 0.0)},
    "half away": {"rounding": "half-away"},
    "all at once": {"amsgrad": True, "maximize": True, "decoupled": False, "weight_decay": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_options_equal_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    both, gradient = Both(4096 + 37, **options), gradients(4096 + 37, dtype)
    for step in range(5):
        both.step(gradient(step))
    both.assert_equal()


def test_a_gradient_is_multiplied_before_it_is_used() -> None:
    both, gradient = Both(4097), gradients(4097)
    for step in range(3):
        both.step(gradient(step), factor=1 / 3)
    both.assert_equal()


def test_learning_rates_and_thread_numbers_may_change() -> None:
    both, gradient = Both(3 * 4096 + 5), gradients(3 * 4096 + 5)
    before = torch.get_num_threads()
    try:
        for step, threads in enumerate((1, 2, 3)):
            torch.set_num_threads(threads)
            both.torch.param_groups[0]["lr"] = 0.1 / (step + 1)
            both.options = AdamWOptions(lr=0.1 / (step + 1))
            both.step(gradient(step))
    finally:
        torch.set_num_threads(before)
    both.assert_equal()


def test_ties_and_infinities_come_through_a_step() -> None:
    both = Both(8192, weight_decay=0.0)
    ties = torch.arange(8192, dtype=torch.int32) << 16 | 0x8000
    both.master.data.copy_(ties.view(torch.float32))
    both.master.data[5] = float("inf")
    both.codec.split(both.master.data, both.weight, both.parts, both.scratch)
    assert both.parts.bitmap is not None
    before = both.parts.bitmap.clone()
    assert sum(word.bit_count() for word in before.tolist()) == 4095
    both.step(torch.zeros(8192, dtype=torch.bfloat16))
    both.assert_equal()
    assert torch.equal(both.parts.bitmap, before)


def test_a_weight_that_somebody_wrote_is_stepped_as_it_is() -> None:
    both, gradient = Both(3 * 4096), gradients(3 * 4096)
    both.step(gradient(0))
    both.weight[4096 + 3] = 2.0
    both.master.data[4096:8192] = both.weight[4096:8192].float()
    both.step(gradient(1))
    both.assert_equal()


@pytest.mark.parametrize("divisor", [0.03160696, 0.999999, 0.7071068, 3e-6, 1.9999999, 1.0])
def test_quotients_are_rounded_correctly(divisor: float) -> None:
    # A quotient's rounding depends on the mantissas alone, and on whether an exponent is odd.
    bits = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32)
    special = torch.tensor([0.0, float("inf"), 1e19, 1.2e-23, float("nan")])
    values = torch.cat([special, bits.view(torch.float32)])
    found = torch.empty_like(values)
    function = Library().functions.ascend_quotients
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float)
    assert function(values.data_ptr(), found.data_ptr(), values.numel(), divisor)
    expected = values / divisor
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_gradients_whose_squares_overflow_are_stepped_as_by_torch() -> None:
    both = Both(4097)
    gradient = torch.full((4097,), 1e30)
    gradient[::3] = 1e-30
    for _ in range(2):
        both.step(gradient)
    both.assert_equal()


def test_what_torch_does_not_round_like_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = native_adamw._Arithmetic(fused=not Both(1).native._arithmetic.fused, roots=None)
    monkeypatch.setattr(native_adamw, "_arithmetics", lambda: iter([exact]))
    with pytest.raises(RuntimeError, match="would not equal torch's"):
        NativeAdamW()
