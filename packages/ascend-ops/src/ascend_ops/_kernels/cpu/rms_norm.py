"""RMSNorm in C, in FP32, rounded once.

Forward reads a row and, while it is in the cache, reads it again. Backward sums a row's squares
again rather than have its root saved, and the gradient of the weight in FP32: of 64 rows each,
these for up to 64 chunks of rows, and then the chunks in their order. So numbers do not depend on
how many threads there are.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ascend_ops._kernels.cpu._library import DTYPES, IN_FP64, Function
from ascend_ops._kernels.cpu._rows import rows_of

__all__ = ["CpuRmsNorm", "load"]

_CHUNKS = 64
_FEWEST_ROWS = 8  # of a chunk: its sum is memory that is written and read


class _RmsNorm(ctypes.Structure):
    """`RmsNorm` of kernels.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("scale_grads", ctypes.c_void_p),
        ("chunks", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class CpuRmsNorm:
    """See `ascend_ops._operators.rms_norm.RmsNormKernel`.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here.
    """

    def __init__(self) -> None:
        self._compute = Function("ascend_rms_norm")

    def refusal(
        self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> str | None:
        """Takes everything but an x of FP64."""
        return None if x.dtype in DTYPES else IN_FP64

    def forward(self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
        """See the protocol."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(y, None, x, _scale(x, weight, unit_offset), None, eps)
        return y

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
        of_scale = None
        if weight is not None and weight_grad:
            rows = x.shape[:-1].numel()
            chunks = min(_CHUNKS, max(1, rows // _FEWEST_ROWS))
            of_scale = x.new_empty((chunks, 2, x.shape[-1]), dtype=torch.float32)
        self._run(x_grad, grad, x, _scale(x, weight, unit_offset), of_scale, eps)
        if weight is None or of_scale is None:
            return x_grad, None
        if not x.numel():
            return x_grad, torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return x_grad, of_scale[0, 0].to(weight.dtype, copy=True)

    def _run(
        self,
        out: Tensor,
        grad: Tensor | None,
        x: Tensor,
        scale: Tensor,
        of_scale: Tensor | None,
        eps: float,
    ) -> None:
        if x.numel() == 0:
            return
        columns = x.shape[-1]
        x, x_stride = rows_of(x, columns)
        grad, grad_stride = (None, 0) if grad is None else rows_of(grad, columns)
        rows = x.numel() // columns
        structure = _RmsNorm(
            rows,
            columns,
            *(None if t is None else t.data_ptr() for t in (x, grad, out, scale, of_scale)),
            rows if of_scale is None else of_scale.shape[0],
            x_stride,
            grad_stride,
            eps,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        self._compute(structure)


def _scale(x: Tensor, weight: Tensor | None, unit_offset: bool) -> Tensor:
    """What each column is multiplied with, in FP32."""
    if weight is None:
        return x.new_ones(x.shape[-1], dtype=torch.float32)
    wide = weight.to(torch.float32)
    return (wide + 1 if unit_offset else wide).contiguous()


def load() -> CpuRmsNorm:
    """Return the kernel.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here.
    """
    return CpuRmsNorm()
