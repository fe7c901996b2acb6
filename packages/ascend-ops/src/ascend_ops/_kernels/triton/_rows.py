"""How a tensor is laid before a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block", "refusal_of_dtypes", "rows_of"]


def refusal_of_dtypes(*tensors: Tensor | None) -> str | None:
    """Why tensors of these dtypes cannot be taken; None where they can be."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return "Triton's kernels compute in FP32, and a tensor is FP64."
    return None


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return `x` as [rows, width], of any two strides; a copy where no two will do."""
    return x.reshape(-1, width)


def block(count: int, most: int) -> int:
    """The power of two that holds `count`, or `most`."""
    return min(1 << max(0, count - 1).bit_length(), most)
