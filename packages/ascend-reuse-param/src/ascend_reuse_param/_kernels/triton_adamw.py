"""AdamW on split parameters in one kernel of Triton: read once, stepped, written once.

[Note: whose rounding] The step equals a join, torch's own AdamW on FP32 (its for-loop, or its
foreach, which on CUDA are not the same) and a split, in every bit. Torch steps there in a dozen
kernels, and promises nothing of how they round. What can differ from one build to another:

    fused           whether the compiler made one rounding of a product and a sum
    squares_first   addcmul_ is value * (g * g) rather than (value * g) * g
    reciprocal      a division by a number is a product with its reciprocal
    quotient_first  addcdiv_ is value * (m / divisor) rather than (value * m) / divisor

So `TritonAdamW` steps some thousand elements by torch and by each of these, until the bits are
equal. Where none is, the step is not to be had: joining, torch's step and splitting do the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ascend_core.errors import UnavailableError
from ascend_reuse_param._bits import BLOCK, Parts, blocks_of
from ascend_reuse_param._kernels.adamw import (
    AdamWOptions,
    Moments,
    check_operands,
    equals,
    torchs_step,
)
from ascend_reuse_param._kernels.triton_codec import COMPILING, TritonCodec

__all__ = ["Arithmetic", "TritonAdamW"]

# Of elements, and the averages; the last are so fast that lerp starts from its other end.
_USUAL, _FAST = (0.9, 0.999), (0.3, 0.5)
_PROBES = ((2 * BLOCK + 3, _USUAL), (BLOCK + 37, _USUAL), (64, _USUAL), (BLOCK - 1, _FAST))


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a step rounds; see the note above."""

    fused: bool
    reciprocal: bool
    quotient_first: bool
    squares_first: bool


class TritonAdamW:
    """AdamW and Adam on a weight and its parts, equal to one of torch's forms in every bit.

    Args:
        codec: What splits and joins on that device.
        foreach: Whether it is to equal torch's foreach rather than its for-loop.
        reference: What it is to equal, instead of torch: a `Reference` that takes `foreach`, too.

    Raises:
        UnavailableError: When torch rounds as none of the ways that are known here.

    Attributes:
        codec: What splits and joins on that device.
        arithmetic: How that form rounds on this device.
    """

    def __init__(
        self, codec: TritonCodec, *, foreach: bool, reference: Callable[..., None] = torchs_step
    ) -> None:
        self.codec = codec
        self.arithmetic = self._proven(reference, foreach=foreach)

    def step(
        self,
        weight: torch.Tensor,
        parts: Parts,
        gradient: torch.Tensor,
        moments: Moments,
        *,
        step: float,
        options: AdamWOptions,
    ) -> None:
        """See `AdamWStep.step`. The host waits for nothing."""
        check_operands(weight, gradient, moments)
        if weight.numel() == 0:
            return
        kernels, is_bf16 = self.codec.kernels, gradient.dtype == torch.bfloat16
        with kernels.here():
            kernels.module.adamw[(blocks_of(weight.numel()),)](
                *kernels.arguments(weight, parts),
                gradient.view(torch.int16 if is_bf16 else torch.int32),
                moments.exp_avg,
                moments.exp_avg_sq,
                moments.max_exp_avg_sq,
                weight.numel(),
                TO_EVEN=self.codec.rounding == "nearest-even",
                IS_BF16=is_bf16,
                AMSGRAD=moments.max_exp_avg_sq is not None,
                **self._numbers(step, options),
                **COMPILING,
            )

    def _numbers(self, step: float, options: AdamWOptions) -> dict[str, Any]:
        """What the kernel computes with, from Python's floats, as torch computes it."""
        beta1, beta2 = options.betas
        rounding = self.arithmetic
        average = _single(1 - beta1)
        near = abs(average) < 0.5  # torch's lerp starts from the end that is nearer
        correction = _single((1 - beta2**step) ** 0.5)
        return {
            "decay": float(1 - options.lr * options.weight_decay),
            "coupled_decay": float(options.weight_decay),
            "average": average if near else _single(average - 1.0),
            "beta2": float(beta2),
            "square": float(1 - beta2),
            "correction": 1.0 / correction if rounding.reciprocal else correction,
            "eps": float(options.eps),
            "negative_step_size": float(-(options.lr / (1 - beta1**step))),
            "MAXIMIZE": options.maximize,
            "DECOUPLED": options.decoupled and options.weight_decay != 0,
            "COUPLED": not options.decoupled and options.weight_decay != 0,
            "NEAR": near,
            "FUSED": rounding.fused,
            "SQUARES_FIRST": rounding.squares_first,
            "RECIPROCAL": rounding.reciprocal,
            "QUOTIENT_FIRST": rounding.quotient_first,
        }

    def _proven(self, reference: Callable[..., None], *, foreach: bool) -> Arithmetic:
        torchs = partial(reference, foreach=foreach)
        probed = partial(equals, self, self.codec, torchs, device=self.codec.kernels.device)
        for arithmetic in _arithmetics():
            self.arithmetic = arithmetic
            if all(
                probed(numel=numel, seed=seed, betas=betas)
                for seed, (numel, betas) in enumerate(_PROBES)
            ):
                return arithmetic
        form = "foreach" if foreach else "for-loop"
        raise UnavailableError(
            f"the Triton step of AdamW is not used for torch's {form}: here it would not equal it.",
            why="torch rounds as none of the ways that are known to it.",
            instead="nothing need be done: joining, stepping and splitting one after the other "
            "gives the same results, more slowly.",
        )


def _single(number: float) -> float:
    """Round to FP32."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _arithmetics() -> Iterator[Arithmetic]:
    """The ways to round, the likeliest first."""
    for choice in itertools.product((True, False), repeat=4):
        yield Arithmetic(*choice)
