"""RMSNorm by torch's operators, in FP32 (FP64 for FP64), rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_ops import reference
from ascend_ops.reference import wide

__all__ = ["EagerRmsNorm", "load"]


class EagerRmsNorm:
    """See `ascend_ops._operators.rms_norm.RmsNormKernel`."""

    def refusal(
        self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> str | None:
        """Takes everything."""
        return None

    def forward(self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
        """See the protocol."""
        return reference.rms_norm(x, weight, eps, unit_offset=unit_offset).contiguous()

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
        wide_x, wide_grad = wide(x), wide(grad)
        rstd = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        normed = wide_x * rstd
        of_normed = wide_grad
        if weight is not None:
            of_normed = wide_grad * (1 + wide(weight) if unit_offset else wide(weight))
        along = (of_normed * normed).mean(-1, keepdim=True)
        x_grad = ((of_normed - normed * along) * rstd).to(x.dtype).contiguous()
        if weight is None or not weight_grad:
            return x_grad, None
        summed = (wide_grad * normed).sum_to_size(weight.shape)
        return x_grad, summed.to(weight.dtype)


def load() -> EagerRmsNorm:
    """Return the kernel."""
    return EagerRmsNorm()
