"""Rotary embedding by Triton: bit-equal to torch's operators in FP32, rounded once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.eager.rotary import EagerRotary
from ascend_ops._kernels.triton._rows import block, refusal_of_dtypes
from ascend_ops._kernels.triton._trial import Comparison, Trial, here, kernels_of, pattern

__all__ = ["COMPILING", "TILE", "TritonRotary", "load"]

# 8 pairs for each of 128 threads. No product is fused with a sum: torch's operators round both.
TILE = 1024
COMPILING: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_Dimension = tuple[int, tuple[int, ...]]  # size, and the strides of x, cos and sin


class TritonRotary:
    """See `ascend_ops._operators.rotary.RotaryKernel`.

    Attributes:
        trial: Whether it is to be used.
    """

    def __init__(self) -> None:
        self._kernels = kernels_of("rotary")
        self.trial = Trial(self._compare)

    def refusal(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> str | None:
        """Refuses FP64, and devices that the trial did not go well on."""
        if refused := refusal_of_dtypes(x, cos, sin):
            return refused
        failure = self.trial.failure(x.device)
        return None if failure is None else str(failure)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> Tensor:
        """See the protocol."""
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return result
        pairs = cos.shape[-1]
        tensors: tuple[Tensor, ...] = (
            x,
            cos.expand(*x.shape[:-1], pairs),
            sin.expand(*x.shape[:-1], pairs),
        )
        dimensions = _merged(tensors)
        if len(dimensions) > 3:  # a copy of each, whose dimensions are one
            tensors = tuple(tensor.contiguous() for tensor in tensors)
            dimensions = _merged(tensors)
        dimensions = [(1, (0, 0, 0))] * (3 - len(dimensions)) + dimensions
        sizes, strides = zip(*dimensions, strict=True)
        of_each = [
            (*of_rows, tensor.stride(-1))
            for of_rows, tensor in zip(zip(*strides, strict=True), tensors, strict=True)
        ]
        self._launch(tensors, result, sizes, of_each, interleaved, inverse)
        return result

    def _launch(
        self,
        tensors: tuple[Tensor, ...],
        result: Tensor,
        sizes: Sequence[int],
        strides: Sequence[Sequence[int]],
        interleaved: bool,
        inverse: bool,
    ) -> None:
        width, pairs, rows = result.shape[-1], tensors[1].shape[-1], math.prod(sizes)
        left = width - 2 * pairs
        of_pairs, of_left = block(pairs, TILE), block(left, TILE) if left else 0
        at_once = TILE // max(of_pairs, of_left)
        blocks = max(math.ceil(pairs / of_pairs), math.ceil(left / of_left) if left else 0)
        with here(result.device):
            self._kernels.forward[(math.ceil(rows / at_once) * blocks,)](
                *tensors,
                result,
                rows,
                *sizes[1:],
                width,
                pairs,
                *(stride for each in strides for stride in each),
                INTERLEAVED=interleaved,
                INVERSE=inverse,
                ROWS=at_once,
                PAIRS=of_pairs,
                LEFT=of_left,
                **COMPILING,
            )

    def _compare(self, device: torch.device) -> Iterator[Comparison]:
        """Both pairings and directions, with elements left over: the same bits."""
        eager = EagerRotary()
        for dtype in (torch.float32, torch.bfloat16):
            x = pattern(2, 7, 3, 50, device=device, dtype=dtype).transpose(1, 2)
            angles = 100 * pattern(7, 20, device=device)
            for interleaved in (False, True):
                call = (x, angles.cos(), angles.sin(), interleaved, not interleaved)
                yield self.forward(*call), eager.forward(*call), 0


def _merged(tensors: Sequence[Tensor]) -> list[_Dimension]:
    """All dimensions but the last, which are of one size in all; neighbours merged where they can.

    Sizes of 1 are left out.
    """
    merged: list[_Dimension] = []
    for at, size in enumerate(tensors[0].shape[:-1]):
        strides = tuple(tensor.stride(at) for tensor in tensors)
        if size == 1:
            continue
        if merged and merged[-1][1] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    return merged


def load() -> TritonRotary:
    """Return the kernel.

    Raises:
        UnavailableError: When Triton is not here, does not work on the current device, or does not
            agree there with torch's operators.
    """
    kernel = TritonRotary()
    kernel.trial.demand()
    return kernel
