"""Rotary embedding in C, in FP32, rounded once: the bits of the reference where angles are FP32."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ascend_ops._kernels.cpu._library import DTYPES, IN_FP64, Function

__all__ = ["CpuRotary", "load"]

_DIMENSIONS = 8  # as kernels.c has it
_Sizes = ctypes.c_int64 * _DIMENSIONS


class _Rotary(ctypes.Structure):
    """`Rotary` of kernels.c."""

    _fields_ = (
        ("dimensions", ctypes.c_int64),
        ("sizes", _Sizes),
        ("x_strides", _Sizes),
        ("angle_strides", _Sizes),
        ("columns", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("sign", ctypes.c_float),
        ("interleaved", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _Dimension(NamedTuple):
    """One over which rows are counted: its size, and the strides of x and of the angles."""

    size: int
    x_stride: int
    angle_stride: int


class CpuRotary:
    """See `ascend_ops._operators.rotary.RotaryKernel`.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here.
    """

    def __init__(self) -> None:
        self._compute = Function("ascend_rotary")

    def refusal(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> str | None:
        """Takes everything but an x of FP64."""
        return None if x.dtype in DTYPES else IN_FP64

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> Tensor:
        """See the protocol."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return y
        x = x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
        cos, sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
        dimensions = _dimensions(x, cos)
        if len(dimensions) > _DIMENSIONS:  # then rows and angles beside one another: one dimension
            shape = (*x.shape[:-1], cos.shape[-1])
            x, cos, sin = (t.contiguous() for t in (x, cos.expand(shape), sin.expand(shape)))
            dimensions = _dimensions(x, cos)
        structure = _Rotary(
            len(dimensions),
            *(_Sizes(*numbers) for numbers in zip(*dimensions, strict=True)),
            x.shape[-1],
            cos.shape[-1],
            *(tensor.data_ptr() for tensor in (x, cos, sin, y)),
            -1.0 if inverse else 1.0,
            interleaved,
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        self._compute(structure)
        return y


def _dimensions(x: Tensor, cos: Tensor) -> list[_Dimension]:
    """Over which rows are counted: as few as there can be, and at least one."""
    angles = cos.expand(*x.shape[:-1], cos.shape[-1])
    found: list[_Dimension] = []
    for new in map(_Dimension, x.shape[:-1], x.stride()[:-1], angles.stride()[:-1]):
        if new.size == 1:
            continue
        last = found[-1] if found else None
        if last and last[1:] == (new.size * new.x_stride, new.size * new.angle_stride):
            found[-1] = _Dimension(last.size * new.size, new.x_stride, new.angle_stride)
        else:
            found.append(new)
    return found or [_Dimension(1, 0, 0)]


def load() -> CpuRotary:
    """Return the kernel.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here.
    """
    return CpuRotary()
