"""SwiGLU in C.

[Note: proven on the spot]
In BF16 and FP16 the kernel has the bits of torch's operators, forward and backward. That depends on
what a compiler made of torch, and on what one here makes of kernels.c, and no test of ours has seen
that pair. So before the kernel is handed out it computes all 65536 gates in both dtypes, and each
result is compared with torch's. Where one differs, torch's operators are used instead.

In FP32 it has the bits of torch's vectors. What is left of a row when these are full, and what is
strided, torch computes by another exp: another last bit for 2 in 1000 numbers, where our bits
depend on an element's value alone. By the same exp torch's own FP16 gradients differ from its
vectors' for 3 in a million numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_core.errors import UnavailableError
from ascend_ops._kernels.cpu._library import DTYPES, IN_FP64, Function
from ascend_ops._kernels.cpu._rows import rows_of
from ascend_ops._kernels.eager.swiglu import EagerSwiglu

__all__ = ["CpuSwiglu", "load"]

_EXACT = (torch.bfloat16, torch.float16)


class _Swiglu(ctypes.Structure):
    """`Swiglu` of kernels.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("gate_bias", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("gate_stride", ctypes.c_int64),
        ("up_stride", ctypes.c_int64),
        ("grad_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("limit", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Halves(NamedTuple):
    """What is gated: gate and up of one shape, and the bias of both, in FP32."""

    gate: Tensor
    up: Tensor
    bias: Tensor | None
    columns: int


class CpuSwiglu:
    """See `ascend_ops._operators.swiglu.SwigluKernel`.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here.
    """

    def __init__(self) -> None:
        self._compute = Function("ascend_swiglu")

    def refusal(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> str | None:
        """Takes everything but FP64."""
        return None if parts[0].dtype in DTYPES else IN_FP64

    def forward(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> Tensor:
        """See the protocol."""
        halves = _halves(parts, dim, bias, None)
        y = torch.empty_like(halves.gate, memory_format=torch.contiguous_format)
        self._run(halves, None, (y, None), halves.columns, limit)
        return y

    def backward(
        self,
        grad: Tensor,
        parts: Sequence[Tensor],
        dim: int,
        bias: Tensor | None,
        limit: float | None,
    ) -> tuple[Tensor, ...]:
        """See the protocol."""
        halves = _halves(parts, dim, bias, grad)
        grads = tuple(torch.empty_like(p, memory_format=torch.contiguous_format) for p in parts)
        gate_grad, up_grad = grads if len(grads) == 2 else grads[0].chunk(2, dim)
        self._run(halves, grad, (gate_grad, up_grad), halves.columns * 2 // len(grads), limit)
        return grads

    def _run(
        self,
        halves: _Halves,
        grad: Tensor | None,
        out: tuple[Tensor, Tensor | None],
        out_stride: int,
        limit: float | None,
    ) -> None:
        if halves.gate.numel() == 0:
            return
        columns, dtype = halves.columns, halves.gate.dtype
        gate, gate_stride = rows_of(halves.gate, columns)
        up, up_stride = rows_of(halves.up, columns)
        grad, grad_stride = (None, 0) if grad is None else rows_of(grad, columns)
        gate_bias, up_bias = (None, None) if halves.bias is None else halves.bias.chunk(2)
        tensors = (gate, up, grad, *out, gate_bias, up_bias)
        structure = _Swiglu(
            gate.numel() // columns,
            columns,
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            gate_stride,
            up_stride,
            grad_stride,
            out_stride,
            # as torch compares and clamps: with the limit in the tensors' dtype
            math.inf if limit is None else gate.new_tensor(limit).item(),
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        self._compute(structure)


def _halves(parts: Sequence[Tensor], dim: int, bias: Tensor | None, grad: Tensor | None) -> _Halves:
    if len(parts) == 2:
        gate, up = parts
        is_dense = all(t is None or t.is_contiguous() for t in (gate, up, grad))
        return _Halves(gate, up, None, gate.numel() if is_dense else gate.shape[-1])
    x = parts[0]
    dim %= x.dim()
    columns = x.shape[dim:].numel() // 2
    if bias is not None and (dim < x.dim() - 1 or bias.dtype == torch.float64):
        x, bias = (x + bias.view(-1, *[1] * (x.dim() - 1 - dim))).to(x.dtype), None
    gate, up = x.chunk(2, dim)
    return _Halves(gate, up, None if bias is None else bias.float().contiguous(), columns)


def load() -> CpuSwiglu:
    """Return the kernel, once it is proven.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here, or gives other bits than torch.
    """
    kernel = CpuSwiglu()
    for dtype in _EXACT:
        if not _equals_torch(kernel, dtype):
            raise UnavailableError(
                "SwiGLU in C is not used: it would not equal torch's operators.",
                why=f"on this processor, this torch computes other bits in {dtype}.",
                instead="nothing need be done: torch's operators give the right ones, more slowly.",
            )
    return kernel


def _equals_torch(kernel: CpuSwiglu, dtype: torch.dtype) -> bool:
    """Compare what both compute from all 65536 gates."""
    patterns = torch.arange(1 << 16, device="cpu")
    # odd multiples are the patterns in another order
    gate, up, grad = ((patterns * odd).to(torch.int16).view(dtype) for odd in (1, 0x9E37, 0x85EB))
    computed = []
    for computing in (kernel, EagerSwiglu()):
        y = computing.forward((gate, up), -1, None, None)
        computed.append((y, *computing.backward(grad, (gate, up), -1, None, None)))
    return all(
        torch.allclose(ours, torchs, rtol=0, atol=0, equal_nan=True)
        for ours, torchs in zip(*computed, strict=True)
    )
