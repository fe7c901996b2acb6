"""RMSNorm by `npu_rms_norm`: computed in FP32 and rounded once.

[Note: what the operator has not]
* Its backward wants `rstd`, the factor of each row, which is not kept from forward to backward. The
  operator of the forward pass makes it again; it also makes the result again, which is let go.
* It takes a weight of the dtype of x. Where they differ, or 1 is added to the weight, which is a
  sum in FP32, all is computed in FP32: a weight rounded to BF16 would be another one (1 + 0.0039 is
  1 there). x is converted for it, at 20 bytes of traffic per element of BF16, where torch's own
  operators need 40.
* Documentation of older versions speaks of two dimensions or more: x is given as [rows, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.npu._device import operators, refusal_of

__all__ = ["NpuRmsNorm", "load"]


class NpuRmsNorm:
    """See `ascend_ops._operators.rms_norm.RmsNormKernel`.

    Args:
        npu: The operators of torch_npu.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu

    def refusal(
        self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> str | None:
        """See the protocol."""
        return refusal_of(x=x, weight=weight)

    def forward(self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
        """See the protocol."""
        if not x.numel():
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, gamma = _rows(x, weight, unit_offset)
        y: Tensor = self._npu.npu_rms_norm(rows, gamma, eps)[0]
        return y.to(x.dtype).view(x.shape)

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
        wanted = weight is not None and weight_grad
        if not x.numel():
            empty = torch.empty_like(x, memory_format=torch.contiguous_format)
            return empty, torch.zeros_like(weight) if wanted and weight is not None else None
        rows, gamma = _rows(x, weight, unit_offset)
        grad = grad.to(rows.dtype).reshape(rows.shape).contiguous()
        rstd = self._npu.npu_rms_norm(rows, gamma, eps)[1]
        x_grad, gamma_grad = self._npu.npu_rms_norm_backward(grad, rows, gamma, rstd)
        x_grad = x_grad.to(x.dtype).view(x.shape)
        if weight is None or not weight_grad:
            return x_grad, None
        return x_grad, gamma_grad.to(weight.dtype)


def _rows(x: Tensor, weight: Tensor | None, unit_offset: bool) -> tuple[Tensor, Tensor]:
    """The rows of x, [rows, D], and what it is multiplied by, [D], in one dtype."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if weight is None:
        return rows, rows.new_ones(rows.shape[1])
    gamma = 1 + weight.float() if unit_offset else weight.contiguous()
    if gamma.dtype != rows.dtype:
        return rows.float(), gamma.float()
    return rows, gamma


def load() -> NpuRmsNorm:
    """Return the kernel.

    Raises:
        UnavailableError: When torch_npu cannot be imported.
    """
    return NpuRmsNorm(operators())
