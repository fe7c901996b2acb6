"""reuse-param against FP32 masters beside the weights, a whole step of each.

The baseline is what one writes by hand: fused AdamW on FP32 masters, whose gradients are cast from
BF16 before and whose values are rounded into the BF16 weights behind. All variants step weights of
their own, with the same gradients.

Everything runs on one thread: threads that wait for one another would count as work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from ascend_core.device import current_backend
from ascend_core.memory import measure_peak
from ascend_core.optim import windowed
from ascend_reuse_param import ReuseParamConfig, reuse_param
from benchmarks.case import Case, Variant
from benchmarks.threads import one_thread

BASELINE = "fused AdamW on FP32 masters, casts"


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    count, numel = (3, 40_000) if quick else (4, 8_000_000)
    return [
        Case(
            f"{count} BF16 parameters of {numel:,} elements",
            lambda: _variants(count, numel),
            baseline=BASELINE,
            rounds=15,
            bytes_are="of weights, masters or residuals, and state, with what a step allocates",
            around=one_thread,
        )
    ]


class _ByHand:
    """Masters beside the weights, as one writes it without this suite."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [nn.Parameter(weight.detach().float()) for weight in weights]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = optim.AdamW(self.masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None and master.grad is not None
            master.grad.copy_(weight.grad)
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


def _variants(count: int, numel: int) -> dict[str, Variant]:
    device = current_backend().device()
    gradients = [torch.randn(numel, device=device).bfloat16() for _ in range(count)]

    def by_hand() -> Any:
        return _ByHand(_weights(gradients))

    def beside() -> Any:
        return windowed(_adamw(gradients, fused=True), master_weights=True, times=16)

    def ours(kernels: str = "auto", **options: Any) -> Callable[[], Any]:
        return lambda: reuse_param(_adamw(gradients, **options), ReuseParamConfig(kernels=kernels))

    makers: dict[str, Callable[[], Any]] = {
        BASELINE: by_hand,
        "windowed, masters beside the weights": beside,
        "reuse_param, one native pass": ours(),
        "reuse_param, native join and split, fused AdamW": ours(fused=True),
        "reuse_param, compiled join and split, fused AdamW": ours("compiled", fused=True),
        "reuse_param, torch's operators, fused AdamW": ours("eager", fused=True),
    }
    return {name: Variant(make().step, _bytes_of(make)) for name, make in makers.items()}


def _weights(gradients: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.randn_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    return weights


def _adamw(gradients: Sequence[torch.Tensor], **options: Any) -> optim.AdamW:
    return optim.AdamW(_weights(gradients), lr=1e-4, **options)


def _bytes_of(make: Callable[[], Any]) -> Callable[[], int]:
    """The peak of a second step, everything but the gradients included."""

    def measure() -> int:
        with measure_peak(current_backend().device()) as memory:
            optimizer = make()
            optimizer.step()
            optimizer.step()
        return memory.peak_bytes

    return measure
