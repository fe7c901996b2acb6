"""Triton's kernels where they run: on cuda, or on the CPU in Triton's interpreter.

`test_kernels_triton.py` starts pytest on this file, in a process of its own: Triton decides when it
is imported whether it interprets.

The interpreter computes with numpy. It rounds twice where a kernel says `tl.fma`, and takes roots
that are correct, which torch's on a CPU (MKL's) need not be. So a step is compared there with
torch's operators in the order that is asked for, each rounded alone; and, with a fused product and
torch's own roots put into the interpreter, with torch's AdamW itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from ascend_core import UnavailableError
from ascend_core.optim import windowed
from ascend_core.optim.arena import Arena
from ascend_core.testing import bitwise_equal
from ascend_reuse_param._adamw import AdamWKernel
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._kernels import triton_codec
from ascend_reuse_param._kernels.adamw import AdamWOptions, Moments, torchs_step
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.triton_adamw import Arithmetic, TritonAdamW
from ascend_reuse_param._kernels.triton_codec import TritonCodec
from ascend_reuse_param.split_home import SplitHome

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if IN_INTERPRETER else torch.device("cuda", 0)
SIZES = (0, 1, 7, 63, 64, 65, 4095, 4096, 4097, 8193)
interpreted = pytest.mark.skipif(not IN_INTERPRETER, reason="it is about Triton's interpreter")
not_interpreted = pytest.mark.skipif(IN_INTERPRETER, reason="Triton's interpreter is not cuda")


@pytest.fixture
def as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter round as torch does on this CPU."""
    if not IN_INTERPRETER:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        # The product of two FP32 values is exact in FP64.
        wide = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(wide.astype(np.float32), z.dtype)

    def root(self: Any, x: Any) -> Any:
        return TensorHandle(torch.from_numpy(x.data).sqrt().numpy(), x.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    monkeypatch.setattr(InterpreterBuilder, "create_precise_sqrt", root)


Proven = Callable[[Rounding, bool], TritonAdamW]


@pytest.fixture(scope="module")
def proven_once() -> Proven:
    """Steps of a rounding and a form of torch: each takes the interpreter some seconds to prove."""
    return functools.cache(
        lambda rounding, foreach: TritonAdamW(TritonCodec(DEVICE, rounding), foreach=foreach)
    )


@pytest.fixture
def proven(proven_once: Proven, as_torch: None) -> Proven:
    return proven_once


def test_every_low_half_is_exact_beside_high_halves_of_each_kind() -> None:
    highs = (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC1, 0x807F, 0xFF85, 0xFFFF)
    signed = torch.tensor([high << 16 for high in highs]).to(torch.int32).unsqueeze(1)
    bits = (signed | torch.arange(1 << 16, dtype=torch.int32)).view(-1).to(DEVICE)
    master, numel, codec = bits.view(torch.float32), bits.numel(), TritonCodec(DEVICE)
    weight = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    parts, scratch = Parts.empty(numel, DEVICE), Arena(0, DEVICE)
    codec.split(master, weight, parts, scratch)
    nan = master.isnan()
    assert torch.equal(weight[~nan].view(torch.int16), master[~nan].bfloat16().view(torch.int16))
    assert torch.equal(weight.isnan(), nan)
    joined = torch.empty_like(master)
    codec.join(weight, parts, joined, scratch)
    assert torch.equal(joined.view(torch.int32), bits)


def test_kernels_that_give_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(EagerCodec):
        def join(self, weight: Any, parts: Any, master: Any, scratch: Any) -> None:
            super().join(weight, parts, master, scratch)
            master.view(torch.int32)[-1] ^= 1

    monkeypatch.setattr(triton_codec, "EagerCodec", Wrong)
    with pytest.raises(UnavailableError, match="they would not equal torch's operators"):
        TritonCodec(DEVICE)


def test_what_triton_raises_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(TritonCodec, "split", broken)
    with pytest.raises(UnavailableError, match="ended with OSError: no compiler"):
        TritonCodec(DEVICE)


@dataclasses.dataclass(frozen=True)
class Separately:
    """Torch's operators in the order of an arithmetic, each rounded alone."""

    arithmetic: Arithmetic

    def __call__(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        moments: Moments,
        *,
        step: float,
        options: AdamWOptions,
        foreach: bool,
    ) -> None:
        beta1, beta2 = options.betas
        g = -gradient if options.maximize else gradient
        if options.weight_decay and options.decoupled:
            master.mul_(1 - options.lr * options.weight_decay)
        elif options.weight_decay:
            g = g + master * options.weight_decay
        m, v = moments.exp_avg, moments.exp_avg_sq
        average = torch.tensor(1 - beta1, dtype=torch.float32, device=m.device)
        m.copy_(m + (g - m) * average if average < 0.5 else g + (g - m) * (average - 1))
        squares = g * g * (1 - beta2) if self.arithmetic.squares_first else g * (1 - beta2) * g
        v.mul_(beta2).add_(squares)
        largest = moments.max_exp_avg_sq
        if largest is not None:
            v = torch.maximum(largest, v, out=largest)
        root = v.double().sqrt().float()  # rounded correctly: FP64 is more than twice as wide
        correction = torch.tensor((1 - beta2**step) ** 0.5, dtype=torch.float32, device=m.device)
        root = root * (1 / correction) if self.arithmetic.reciprocal else root / correction
        divisor, size = root + options.eps, -(options.lr / (1 - beta1**step))
        change = m / divisor * size if self.arithmetic.quotient_first else m * size / divisor
        master.add_(change)


ARITHMETICS = [Arithmetic(False, *choice) for choice in itertools.product((True, False), repeat=3)]


class Both:
    """A parameter that is stepped by a reference as FP32, and by Triton as BF16 and its parts."""

    def __init__(
        self,
        numel: int,
        triton: TritonAdamW,
        reference: Any = torchs_step,
        *,
        foreach: bool = False,
        amsgrad: bool = False,
        **rest: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(numel)
        self.master = (torch.randn(numel, generator=generator) / 10).to(DEVICE)
        self.options = AdamWOptions(**{"lr": 1e-3, **rest})
        self.triton, self.reference, self.foreach = triton, reference, foreach
        self.codec, self.scratch = triton.codec, Arena(0, DEVICE)
        self.weight = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
        self.parts = Parts.empty(numel, DEVICE, self.codec.rounding)
        self.moments, self.theirs = (Moments.zeros(numel, DEVICE, amsgrad=amsgrad) for _ in "12")
        self.codec.split(self.master, self.weight, self.parts, self.scratch)
        self.steps = 0

    def step(self, gradient: torch.Tensor) -> None:
        self.steps += 1
        gradient = gradient.to(DEVICE)
        given: dict[str, Any] = {"step": self.steps, "options": self.options}
        self.reference(self.master, gradient.float(), self.theirs, **given, foreach=self.foreach)
        self.triton.step(self.weight, self.parts, gradient, self.moments, **given)

    def assert_equal(self) -> None:
        joined = torch.empty_like(self.master)
        self.codec.join(self.weight, self.parts, joined, self.scratch)
        assert torch.equal(joined.view(torch.int32), self.master.view(torch.int32))
        for ours, theirs in zip(self.moments.tensors(), self.theirs.tensors(), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def gradients(numel: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.randn(numel, generator=generator).to(dtype)


@interpreted
@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
def test_each_order_of_operators_is_found_and_followed(arithmetic: Arithmetic) -> None:
    reference = Separately(arithmetic)
    triton = TritonAdamW(TritonCodec(DEVICE), foreach=False, reference=reference)
    both, gradient = Both(4097, triton, reference), gradients(4097)
    found = dataclasses.replace(triton.arithmetic, fused=False)  # numpy rounds twice anyhow
    assert found == arithmetic
    for _ in range(4):
        both.step(gradient())
    both.assert_equal()


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("numel", SIZES)
def test_the_step_equals_torchs(numel: int, foreach: bool, proven: Proven) -> None:
    both = Both(numel, proven("nearest-even", foreach), foreach=foreach)
    gradient = gradients(numel)
    for _ in range(5):
        both.step(gradient())
    both.assert_equal()


OPTIONS: dict[str, dict[str, Any]] = {
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "Adam": {"decoupled": False},
    "Adam without decay": {"decoupled": False, "weight_decay": 0.0},
    "without decay": {"weight_decay": 0.0},
    "fast averages": {"betas": (0.3, 0.5), "eps": 1e-3, "lr": 0.3},
    "no averages": {"betas": (0.0, 0.0)},
    "whole numbers": {"lr": 1, "eps": 1, "weight_decay": 1},
    "all at once": {"amsgrad": True, "maximize": True, "decoupled": False, "weight_decay": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_options_equal_torchs(options: dict[str, Any], dtype: torch.dtype, proven: Proven) -> None:
    both = Both(4096 + 37, proven("nearest-even", False), **options)
    gradient = gradients(4096 + 37, dtype)
    for _ in range(3):
        both.step(gradient())
    both.assert_equal()


def test_a_step_that_rounds_half_away_equals_torchs(proven: Proven) -> None:
    both, gradient = Both(4097, proven("half-away", False)), gradients(4097)
    for _ in range(3):
        both.step(gradient())
    both.assert_equal()


def test_a_weight_that_somebody_wrote_is_stepped_as_it_is(proven: Proven) -> None:
    both, gradient = Both(3 * BLOCK, proven("nearest-even", False)), gradients(3 * BLOCK)
    both.step(gradient())
    both.weight[BLOCK + 3] = 2.0
    both.master[BLOCK : 2 * BLOCK] = both.weight[BLOCK : 2 * BLOCK].float()
    both.step(gradient())
    both.assert_equal()


def test_ties_and_infinities_come_through_a_step(proven: Proven) -> None:
    both = Both(8192, proven("nearest-even", False), weight_decay=0.0)
    ties = torch.arange(8192, dtype=torch.int32) << 16 | 0x8000
    both.master.copy_(ties.view(torch.float32))
    both.master[5] = float("inf")
    both.codec.split(both.master, both.weight, both.parts, both.scratch)
    both.step(torch.zeros(8192, dtype=torch.bfloat16))
    both.assert_equal()


def test_gradients_whose_squares_overflow_are_stepped_as_by_torch(proven: Proven) -> None:
    both = Both(4097, proven("nearest-even", False))
    gradient = torch.full((4097,), 1e30)
    gradient[::3] = 1e-30
    with np.errstate(all="ignore"):  # of the interpreter
        for _ in range(2):
            both.step(gradient)
    both.assert_equal()


def test_what_rounds_as_none_of_the_ways_is_refused() -> None:
    def in_fp64(master: torch.Tensor, gradient: Any, moments: Moments, **rest: Any) -> None:
        wide = master.double()
        theirs = Moments(*(tensor.double() for tensor in moments.tensors()))
        torchs_step(wide, gradient.double(), theirs, **rest)
        master.copy_(wide)
        for tensor, value in zip(moments.tensors(), theirs.tensors(), strict=True):
            tensor.copy_(value)

    with pytest.raises(UnavailableError, match="is not used for torch's foreach: here"):
        TritonAdamW(TritonCodec(DEVICE), foreach=True, reference=in_fp64)


def on_triton(step: TritonAdamW, weights: list[nn.Parameter], **options: Any) -> Any:
    """An optimizer whose masters Triton splits, joins and steps, as `reuse_param` builds it."""
    home = SplitHome(DEVICE, step.codec)
    home.kernel = AdamWKernel({"for-loop": step}, home.split.parts)
    adamw = optim.AdamW(weights, **options)
    return windowed(adamw, home=home, times=2, master_weights=True)


@pytest.mark.parametrize("form", [{"foreach": False}, {"fused": True}], ids=str)
def test_training_equals_masters_beside_the_weights(
    form: dict[str, bool], run: Any, proven: Proven
) -> None:
    plain = run("beside", device=DEVICE, **form)
    flat = torch.empty(sum(one.numel() for one in plain.weights) + 1, dtype=torch.bfloat16)
    weights, end = [], 1  # at odd numbers of elements, so at any even address
    flat = flat.to(DEVICE)
    for one in plain.weights:
        begin, end = end, end + one.numel()
        view = flat[begin:end].view(one.shape).copy_(one.detach())
        weights.append(nn.Parameter(view))
    ours = run(weights=weights, device=DEVICE, **form)
    ours.optimizer.remove()
    ours.optimizer = on_triton(proven("nearest-even", False), weights, lr=1e-2, **form)
    ours.train(4, missing=(1,))
    plain.train(4, missing=(1,))
    ours.weights[6].data[17] = 3.0
    plain.weights[6].data[17] = 3.0
    plain.optimizer.masters[6].data[:BLOCK] = plain.weights[6].data[:BLOCK].float()
    assert ours.train(2, first=4).same_as(plain.train(2, first=4))
    assert all(map(bitwise_equal, ours.masters(), plain.masters()))


@not_interpreted
@pytest.mark.parametrize("form", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}])
def test_reuse_param_takes_triton_on_cuda(form: dict[str, bool], run: Any) -> None:
    plain, ours = run("beside", device=DEVICE, **form), run(device=DEVICE, **form)
    assert isinstance(ours.optimizer._home.split._codec, TritonCodec)
    assert ours.optimizer._home.kernel is not None
    assert ours.train(5, missing=(1,)).same_as(plain.train(5, missing=(1,)))
