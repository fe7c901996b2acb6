"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_ops.reference._precision import wide

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, unit_offset: bool = False
) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension of x."""
    wider = wide(x)
    y = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (1 + wide(weight) if unit_offset else wide(weight))
    return y.to(x.dtype)
