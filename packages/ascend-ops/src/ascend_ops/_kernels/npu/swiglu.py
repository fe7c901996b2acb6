"""SwiGLU by `npu_swiglu`: computed in FP32 and rounded once.

[Note: what the operator has not]
It takes one tensor and a dimension, and neither bias nor limit. In bytes that are read and written
for each element of a BF16 result, where torch's own operators need 10, and the operator alone 6:

* A bias is added first: 14, where torch's operators need 18.
* A limit clamps gate and up into a tensor of their own: 14, where torch's need 18.
* Two tensors would have to be joined: 14, where torch's need 10, and as many with backward (40),
  in which the gradients would be parted again; and twice the memory of the result for as long as
  it takes. They are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.npu._device import operators, refusal_of

__all__ = ["NpuSwiglu", "load"]

_MOST_DIMENSIONS = 8


class NpuSwiglu:
    """See `ascend_ops._operators.swiglu.SwigluKernel`.

    Args:
        npu: The operators of torch_npu.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu

    def refusal(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> str | None:
        """See the protocol."""
        if len(parts) == 2:
            return (
                "npu_swiglu takes gate and up in one tensor, and to join them costs more than it "
                "saves; let one linear layer make both, and call swiglu."
            )
        (x,) = parts
        if x.dim() > _MOST_DIMENSIONS:
            return f"x has {x.dim()} dimensions, and npu_swiglu takes {_MOST_DIMENSIONS}."
        return refusal_of(x=x)

    def forward(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> Tensor:
        """See the protocol."""
        x = _with_bias(parts[0], dim, bias)
        if not x.numel():
            return torch.empty_like(x.chunk(2, dim)[0], memory_format=torch.contiguous_format)
        result: Tensor = self._npu.npu_swiglu(_clamped(x, dim, limit), dim)
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
        x = _with_bias(parts[0], dim, bias)
        if not x.numel():
            return (torch.empty_like(x, memory_format=torch.contiguous_format),)
        clamped = _clamped(x, dim, limit)
        result: Tensor = self._npu.npu_swiglu_backward(grad.contiguous(), clamped, dim)
        if limit is not None:  # as torch's clamp: the limits let it pass, and no number does not
            (gate, up), (gate_grad, up_grad) = x.chunk(2, dim), result.chunk(2, dim)
            gate_grad.masked_fill_((gate <= limit).logical_not_(), 0)
            up_grad.masked_fill_((up.abs() <= limit).logical_not_(), 0)
        return (result,)


def _with_bias(x: Tensor, dim: int, bias: Tensor | None) -> Tensor:
    """`x + bias`, rounded to the dtype of x, as torch rounds it."""
    if bias is None:
        return x
    shape = [1] * x.dim()
    shape[dim] = -1
    return (x + bias.view(shape)).to(x.dtype)


def _clamped(x: Tensor, dim: int, limit: float | None) -> Tensor:
    """Contiguous x, its halves clamped."""
    if limit is None:
        return x.contiguous()
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    (gate, up), (clamped_gate, clamped_up) = x.chunk(2, dim), result.chunk(2, dim)
    torch.clamp(gate, max=limit, out=clamped_gate)
    torch.clamp(up, -limit, limit, out=clamped_up)
    return result


def load() -> NpuSwiglu:
    """Return the kernel.

    Raises:
        UnavailableError: When torch_npu cannot be imported.
    """
    return NpuSwiglu(operators())
