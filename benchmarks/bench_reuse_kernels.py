"""Splitting FP32 masters into BF16 weights and residuals, and stepping them so, in each form.

The first case moves 8 bytes an element as a copy does; a split's and a join's are compared with it.
The second steps a parameter. Its baseline is what a training without replica reuse does: the BF16
gradient is cast, torch's fused AdamW steps the FP32 master, and the BF16 weight is copied from it.
The others join, step by the same AdamW and split, or do all in one pass of C.

All memory is there before, apart from what the compiled code allocates itself. Everything runs on
one thread: threads that wait for one another would count as work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn, optim

from ascend_core.device import current_backend
from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import Codec, Parts
from ascend_reuse_param._kernels.adamw import AdamWOptions, Moments
from ascend_reuse_param._kernels.compiled import CompiledCodec
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.native import NativeCodec
from ascend_reuse_param._kernels.native_adamw import NativeAdamW
from benchmarks.case import Case, Variant
from benchmarks.threads import one_thread


def cases(*, quick: bool) -> list[Case]:
    """The cases; small ones when `quick`."""
    numel = 1 << 18 if quick else 1 << 24
    held = "of what is held beside the weight between steps"
    return [
        Case(
            f"{numel:,} elements, split and joined",
            lambda: _moved(numel),
            baseline="copy of FP32",
            rounds=25,
            bytes_are=held,
            around=one_thread,
        ),
        Case(
            f"{numel:,} elements, an AdamW step",
            lambda: _stepped(numel),
            baseline="gradient cast, AdamW fused on FP32, weight copied",
            rounds=25,
            bytes_are=held,
            around=one_thread,
        ),
    ]


@dataclasses.dataclass(frozen=True)
class _Held:
    """A weight that is split by a codec, and what that needs."""

    codec: Codec
    master: torch.Tensor
    weight: torch.Tensor
    parts: Parts
    scratch: Arena

    @classmethod
    def of(cls, codec: Codec, master: torch.Tensor) -> _Held:
        numel, device = master.numel(), master.device
        weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
        scratch = Arena(codec.scratch_bytes(numel), device)
        held = cls(codec, master, weight, Parts.empty(numel, device), scratch)
        held.split()
        return held

    def split(self) -> None:
        self.codec.split(self.master, self.weight, self.parts, self.scratch)

    def join(self) -> None:
        self.codec.join(self.weight, self.parts, self.master, self.scratch)

    def nbytes(self) -> int:
        assert self.parts.bitmap is not None
        kept = (self.parts.residual, self.parts.bitmap, self.parts.fingerprints)
        return sum(tensor.nbytes for tensor in kept)


def _codecs(device: torch.device) -> dict[str, Codec]:
    portable: dict[str, Codec] = {"compiled": CompiledCodec(device), "eager": EagerCodec(device)}
    return {"native": NativeCodec(), **portable} if device.type == "cpu" else portable


def _moved(numel: int) -> Mapping[str, Variant]:
    device = current_backend().device()
    master = torch.randn(numel, device=device)
    copied = torch.empty_like(master)
    variants = {"copy of FP32": Variant(lambda: copied.copy_(master))}
    for name, codec in _codecs(device).items():
        held = _Held.of(codec, master)
        variants[f"split, {name}"] = Variant(held.split, held.nbytes)
        variants[f"join, {name}"] = Variant(held.join, held.nbytes)
    return variants


def _stepped(numel: int) -> Mapping[str, Variant]:
    device = current_backend().device()
    gradient = torch.randn(numel, device=device).to(torch.bfloat16)
    plain = _Plain(numel, gradient)
    variants = {
        "gradient cast, AdamW fused on FP32, weight copied": Variant(
            plain.step, lambda: plain.master.nbytes
        )
    }
    for name, codec in _codecs(device).items():
        held = _Held.of(codec, plain.master.data)
        variants[f"join, AdamW fused, split: {name}"] = Variant(plain.around(held), held.nbytes)
    if device.type == "cpu":
        held = _Held.of(NativeCodec(), torch.randn(numel))
        variants["AdamW in one pass, native"] = Variant(_one_pass(held, gradient), held.nbytes)
    return variants


class _Plain:
    """A master that torch steps, with its gradient in BF16."""

    def __init__(self, numel: int, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self.master = nn.Parameter(torch.randn(numel, device=gradient.device))
        self.master.grad = torch.empty_like(self.master)
        self.weight = torch.empty_like(gradient)
        self.optimizer = optim.AdamW([self.master], lr=1e-4, fused=True)

    def step(self) -> None:
        self._cast_and_step()
        self.weight.copy_(self.master.detach())

    def around(self, held: _Held) -> Callable[[], None]:
        def step() -> None:
            held.join()
            self._cast_and_step()
            held.split()

        return step

    def _cast_and_step(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.gradient)
        self.optimizer.step()


def _one_pass(held: _Held, gradient: torch.Tensor) -> Callable[[], None]:
    numel = gradient.numel()
    adamw, options = NativeAdamW(), AdamWOptions(lr=1e-4)
    moments = Moments(torch.zeros(numel), torch.zeros(numel))
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        adamw.step(held.weight, held.parts, gradient, moments, step=step, options=options)

    return run
