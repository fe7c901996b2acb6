"""Optimizers that are stepped in windows, against AdamW as torch steps it.

Every variant steps the same parameters, with the same gradients, and keeps state of its own. On a
CPU the host is the device, so `swap_optimizer` copies its state for nothing: what it takes here is
its copies, which nothing hides, and its bookkeeping. The facade without a home elsewhere moves
nothing; what it takes beyond plain is the price of windows.

The second case has many small parameters, so that its times are those of the bookkeeping: what a
variant takes beyond plain, divided by the number of parameters.

Everything runs on one thread: threads that wait for one another would count as work. DeepSpeed's
optimizer for the CPU is measured where it is installed. torchao's `CPUOffloadOptimizer` refuses a
model on the CPU, and has no row for that reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn, optim

from ascend_core.device import current_backend
from ascend_core.memory import measure_peak
from ascend_core.optim import WindowedOptimizer, windowed
from ascend_swap import SwapOptimizerConfig, swap_optimizer
from benchmarks.case import Case, Variant
from benchmarks.threads import one_thread

Parameters = Sequence[nn.Parameter]


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    large = (3, 40_000) if quick else (25, 4_000_000)
    small = (20, 4096) if quick else (400, 4096)
    return [
        _case("{} parameters of {:,} elements", *large, rounds=15),
        _case("{} parameters of {:,} elements, for the bookkeeping", *small, rounds=40),
    ]


def _case(name: str, count: int, numel: int, rounds: int) -> Case:
    return Case(
        name.format(count, numel),
        lambda: _variants(count, numel),
        baseline="AdamW, fused",
        rounds=rounds,
        bytes_are="of state and temporaries on the device at the peak of a step",
        around=one_thread,
    )


def _variants(count: int, numel: int) -> dict[str, Variant]:
    device = current_backend().device()
    parameters = [nn.Parameter(torch.randn(numel, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(numel, device=device)

    def adamw(**options: Any) -> optim.AdamW:
        return optim.AdamW(parameters, lr=1e-4, **options)

    def swapped(**options: Any) -> WindowedOptimizer:
        return swap_optimizer(adamw(fused=True), SwapOptimizerConfig(**options))

    optimizers: dict[str, optim.Optimizer] = {
        "AdamW, fused": adamw(fused=True),
        "the same in 1 window, nothing moved": windowed(adamw(fused=True)),
        "the same in 16 windows, nothing moved": windowed(adamw(fused=True), times=16),
        "swap_optimizer": swapped(),
        "swap_optimizer, 4 windows": swapped(swap_optimizer_times=4),
        "swap_optimizer, disk": swapped(disk=tempfile.gettempdir()),
        "AdamW, foreach": adamw(foreach=True),
        "AdamW, for-loop": adamw(foreach=False),
    }
    variants = {name: Variant(one.step, _peak_of(one)) for name, one in optimizers.items()}
    return {**variants, **_deepspeeds(parameters)}


def _deepspeeds(parameters: Parameters) -> dict[str, Variant]:
    """DeepSpeed's optimizer for what lies on the host, where both are there."""
    if parameters[0].device.type != "cpu":
        return {}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    # Its device holds none of this: DeepSpeed moves gradients in and weights out around the step.
    return {"DeepSpeedCPUAdam": Variant(DeepSpeedCPUAdam(parameters, lr=1e-4).step)}


def _peak_of(optimizer: optim.Optimizer) -> Callable[[], int]:
    """The bytes of state that lie on the device, and what a step allocates at its peak."""

    def measure() -> int:
        device = current_backend().device()
        if isinstance(optimizer, WindowedOptimizer):
            held: int = optimizer.report()["device_state_bytes"]
        else:
            kept = (t for state in optimizer.state.values() for t in state.values())
            held = sum(t.nbytes for t in kept if t.dim() and t.device == device)
        with measure_peak(device) as memory:
            optimizer.step()
        return held + memory.peak_bytes

    return measure
