"""RMSNorm by Triton, in FP32, rounded once.

Sums are made in another order than torch's, so that results differ in the last bits; they are the
same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.eager.rms_norm import EagerRmsNorm
from ascend_ops._kernels.triton._rows import block, refusal_of_dtypes, rows_of
from ascend_ops._kernels.triton._trial import Comparison, Trial, here, kernels_of, pattern

__all__ = ["LONGEST", "PROGRAMS", "TILE", "TritonRmsNorm", "compiling", "load"]

TILE = 2048  # elements of short rows that a program has at once
LONGEST = 8192  # elements of a row that stays in registers: 16 for each of 512 threads
PROGRAMS = 256  # that sum the weight's gradient: their sums take 4 * 256 bytes for each element


def compiling(elements: int) -> dict[str, Any]:
    """How a kernel is compiled that has so many elements at once: 16 for each thread."""
    return {"num_warps": max(4, elements // 512), "enable_fp_fusion": False}


class TritonRmsNorm:
    """See `ascend_ops._operators.rms_norm.RmsNormKernel`.

    Attributes:
        trial: Whether it is to be used.
    """

    def __init__(self) -> None:
        self._kernels = kernels_of("rms_norm")
        self.trial = Trial(self._compare)

    def refusal(
        self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> str | None:
        """Refuses FP64, and devices that the trial did not go well on."""
        if refused := refusal_of_dtypes(x, weight):
            return refused
        failure = self.trial.failure(x.device)
        return None if failure is None else str(failure)

    def forward(self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
        """See the protocol."""
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return result
        width = x.shape[-1]
        x = rows_of(x, width)
        columns = block(width, LONGEST)
        rows = max(1, TILE // columns)
        with here(x.device):
            self._kernels.forward[(math.ceil(x.shape[0] / rows),)](
                x,
                x if weight is None else weight.contiguous(),
                result,
                *x.shape,
                *x.stride(),
                eps,
                **_of_weight(weight, unit_offset),
                SINGLE=width <= columns,
                ROWS=rows,
                COLUMNS=columns,
                **compiling(rows * columns),
            )
        return result

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        unit_offset: bool,
        weight_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See the protocol."""
        x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
        wanted = weight_grad and weight is not None
        if x.numel() == 0:
            return x_grad, torch.zeros_like(weight) if wanted and weight is not None else None
        width = x.shape[-1]
        x, grad = rows_of(x, width), rows_of(grad, width)
        given = (x, x if weight is None else weight.contiguous(), grad, x_grad)
        sizes = (*x.shape, *x.stride(), *grad.stride())
        options = _of_weight(weight, unit_offset)
        backward = self._short if width <= LONGEST else self._long
        with here(x.device):
            partials = backward(given, sizes, eps, options, wanted)
            if not wanted or weight is None:
                return x_grad, None
            return x_grad, partials.sum(0).to(weight.dtype)

    def _short(
        self,
        given: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        eps: float,
        options: dict[str, bool],
        weight_grad: bool,
    ) -> Tensor:
        x, (rows, width) = given[0], sizes[:2]
        columns = block(width, LONGEST)
        at_once = max(1, TILE // columns)
        tiles = math.ceil(rows / at_once)
        each = math.ceil(tiles / PROGRAMS) if weight_grad else 1
        programs = math.ceil(tiles / each)
        shape = (programs, width) if weight_grad else (0,)
        partials = x.new_empty(shape, dtype=torch.float32)
        self._kernels.backward[(programs,)](
            *given,
            partials,
            *sizes,
            eps,
            each,
            **options,
            WEIGHT_GRAD=weight_grad,
            ROWS=at_once,
            COLUMNS=columns,
            **compiling(at_once * columns),
        )
        return partials

    def _long(
        self,
        given: tuple[Tensor, ...],
        sizes: tuple[int, ...],
        eps: float,
        options: dict[str, bool],
        weight_grad: bool,
    ) -> Tensor:
        (x, _, grad, _), (rows, width) = given, sizes[:2]
        rstds = x.new_empty(rows, dtype=torch.float32)
        self._kernels.backward_of_rows[(rows,)](
            *given, rstds, *sizes, eps, **options, COLUMNS=LONGEST // 2, **compiling(LONGEST // 2)
        )
        if not weight_grad:
            return rstds
        share = math.ceil(rows / PROGRAMS)
        number = math.ceil(rows / share)
        partials = x.new_empty((number, width), dtype=torch.float32)
        self._kernels.backward_of_weight[(number * math.ceil(width / TILE),)](
            x, grad, rstds, partials, *sizes, share, COLUMNS=TILE, **compiling(TILE)
        )
        return partials

    def _compare(self, device: torch.device) -> Iterator[Comparison]:
        """Short rows, long ones, both with a weight and without; within two roundings each."""
        eager = EagerRmsNorm()
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)):
            for rows, width in ((37, 96), (3, LONGEST + 37)):
                x = pattern(rows, width, device=device, dtype=dtype)
                weight = pattern(width, device=device, dtype=dtype, turn=1.0)
                grad = pattern(rows, width, device=device, dtype=dtype, turn=0.5)
                for factor, unit in ((weight, True), (None, False)):
                    given = self.forward(x, factor, 1e-6, unit)
                    yield given, eager.forward(x, factor, 1e-6, unit), tolerance
                    ours = self.backward(grad, x, factor, 1e-6, unit, True)
                    theirs = eager.backward(grad, x, factor, 1e-6, unit, True)
                    yield ours[0], theirs[0], 2 * tolerance
                    if ours[1] is not None and theirs[1] is not None:
                        yield ours[1], theirs[1], 4 * tolerance


def _of_weight(weight: Tensor | None, unit_offset: bool) -> dict[str, bool]:
    return {"HAS_WEIGHT": weight is not None, "UNIT": unit_offset}


def load() -> TritonRmsNorm:
    """Return the kernel.

    Raises:
        UnavailableError: When Triton is not here, does not work on the current device, or does not
            agree there with torch's operators.
    """
    kernel = TritonRmsNorm()
    kernel.trial.demand()
    return kernel
