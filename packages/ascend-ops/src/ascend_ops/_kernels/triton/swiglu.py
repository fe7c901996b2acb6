"""SwiGLU by Triton.

In FP16 and BF16 the results are those of torch's operators, which round after silu and after the
product, but for the last bit of the exponential, which each compiler computes in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.eager.swiglu import EagerSwiglu
from ascend_ops._kernels.triton._rows import block, refusal_of_dtypes, rows_of
from ascend_ops._kernels.triton._trial import Comparison, Trial, here, kernels_of, pattern

__all__ = ["COMPILING", "TILE", "TritonSwiglu", "load"]

# 16 elements for each of 128 threads. Products and sums are rounded one by one, as torch's are.
TILE = 2048
COMPILING: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class _Halves:
    """Gate and up as [rows, width], of any strides, and what is added to them."""

    gate: Tensor
    up: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    inner: int

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.gate.stride(), *self.up.stride())


class TritonSwiglu:
    """See `ascend_ops._operators.swiglu.SwigluKernel`.

    Attributes:
        trial: Whether it is to be used.
    """

    def __init__(self) -> None:
        self._kernels = kernels_of("swiglu")
        self.trial = Trial(self._compare)

    def refusal(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> str | None:
        """Refuses FP64, and devices that the trial did not go well on."""
        if refused := refusal_of_dtypes(*parts, bias):
            return refused
        failure = self.trial.failure(parts[0].device)
        return None if failure is None else str(failure)

    def forward(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> Tensor:
        """See the protocol."""
        shape = list(parts[0].shape)
        shape[dim:] = shape[dim:] if len(parts) == 2 else [shape[dim] // 2, *shape[dim:][1:]]
        result = parts[0].new_empty(shape)
        if result.numel() == 0:
            return result
        halves = _halves(parts, dim, bias, flat=_contiguous(*parts))
        self._launch(self._kernels.forward, halves, (result,), halves.strides, bias, limit)
        return result

    def backward(
        self,
        grad: Tensor,
        parts: Sequence[Tensor],
        dim: int,
        bias: Tensor | None,
        limit: float | None,
    ) -> tuple[Tensor, ...]:
        """See the protocol."""
        grads = tuple(torch.empty_like(p, memory_format=torch.contiguous_format) for p in parts)
        if grads[0].numel() == 0:
            return grads
        flat = _contiguous(grad, *parts)
        halves, written = _halves(parts, dim, bias, flat), _halves(grads, dim, None, flat)
        grad = rows_of(grad, halves.gate.shape[1])
        strides = (*halves.strides, *grad.stride(), written.gate.stride(0))
        tensors = (grad, written.gate, written.up)
        self._launch(self._kernels.backward, halves, tensors, strides, bias, limit)
        return grads

    def _launch(
        self,
        kernel: Any,
        halves: _Halves,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        bias: Tensor | None,
        limit: float | None,
    ) -> None:
        rows, width = halves.gate.shape
        columns = block(width, TILE)
        tile = {"ROWS": TILE // columns, "COLUMNS": columns}
        with here(halves.gate.device):
            kernel[(math.ceil(rows / tile["ROWS"]) * math.ceil(width / columns),)](
                halves.gate,
                halves.up,
                halves.gate_bias,
                halves.up_bias,
                *tensors,
                rows,
                width,
                halves.inner,
                *strides,
                0.0 if limit is None else float(limit),
                HAS_BIAS=bias is not None,
                HAS_LIMIT=limit is not None,
                **tile,
                **COMPILING,
            )

    def _compare(self, device: torch.device) -> Iterator[Comparison]:
        """Either form, in each dtype, with all that goes with it; within two roundings each."""
        eager = EagerSwiglu()
        for dtype, tolerance in (
            (torch.float32, 2e-6),
            (torch.float16, 2e-3),
            (torch.bfloat16, 1.6e-2),
        ):
            x = pattern(5, 2 * 321, device=device, dtype=dtype) * 4
            grad = pattern(5, 321, device=device, dtype=dtype, turn=0.5)
            bias = pattern(2 * 321, device=device, dtype=dtype, turn=1.0)
            calls: list[tuple[Any, ...]] = [((x,), -1, bias, 3.5), (x.chunk(2, 1), -1, None, None)]
            for call in calls:
                yield self.forward(*call), eager.forward(*call), tolerance
                pairs = zip(self.backward(grad, *call), eager.backward(grad, *call), strict=True)
                yield from ((ours, theirs, 4 * tolerance) for ours, theirs in pairs)


def _contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _halves(parts: Sequence[Tensor], dim: int, bias: Tensor | None, flat: bool) -> _Halves:
    """Lay gate and up before a kernel; two that are contiguous (`flat`) are one row each."""
    if len(parts) == 2:
        width = parts[0].numel() if flat else parts[0].shape[-1]
        gate, up = (rows_of(part, width) for part in parts)
        return _Halves(gate, up, gate, up, 1)
    x = parts[0]
    of_dim = x.shape[dim:] if dim < 0 else x.shape[dim - x.dim() :]
    whole = rows_of(x, of_dim.numel())
    gate, up = whole.chunk(2, 1)
    if bias is None:
        return _Halves(gate, up, gate, up, 1)
    gate_bias, up_bias = bias.contiguous().chunk(2)
    return _Halves(gate, up, gate_bias, up_bias, of_dim.numel() // of_dim[0])


def load() -> TritonSwiglu:
    """Return the kernel.

    Raises:
        UnavailableError: When Triton is not here, does not work on the current device, or does not
            agree there with torch's operators.
    """
    kernel = TritonSwiglu()
    kernel.trial.demand()
    return kernel
