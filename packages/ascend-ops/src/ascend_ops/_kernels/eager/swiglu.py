"""SwiGLU by torch's operators.

Bit-equal to `F.silu(gate) * up` and its gradient: silu is rounded to the dtype before the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["EagerSwiglu", "load"]


class EagerSwiglu:
    """See `ascend_ops._operators.swiglu.SwigluKernel`."""

    def refusal(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> str | None:
        """Takes everything."""
        return None

    def forward(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> Tensor:
        """See the protocol."""
        gate, up = _clamped(*_halves(parts, dim, bias), limit)
        product = torch.mul(F.silu(gate), up)
        return product.contiguous()

    def backward(
        self,
        grad: Tensor,
        parts: Sequence[Tensor],
        dim: int,
        bias: Tensor | None,
        limit: float | None,
    ) -> tuple[Tensor, ...]:
        """See the protocol."""
        gate, up = _halves(parts, dim, bias)
        grads = tuple(torch.empty_like(p, memory_format=torch.contiguous_format) for p in parts)
        gate_grad, up_grad = grads if len(grads) == 2 else grads[0].chunk(2, dim)
        clamped_gate, clamped_up = _clamped(gate, up, limit)
        up_grad.copy_(F.silu(clamped_gate) * grad)
        gate_grad.copy_(torch.ops.aten.silu_backward(grad * clamped_up, clamped_gate))
        if limit is not None:  # as torch's clamp: the limits let the gradient pass, NaN does not
            gate_grad.masked_fill_(~(gate <= limit), 0)
            up_grad.masked_fill_(~(up.abs() <= limit), 0)
        return grads


def _halves(parts: Sequence[Tensor], dim: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if len(parts) == 2:
        return parts[0], parts[1]
    x = parts[0]
    if bias is not None:
        shape = [1] * x.dim()
        shape[dim] = -1
        x = (x + bias.view(shape)).to(x.dtype)
    gate, up = x.chunk(2, dim)
    return gate, up


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def load() -> EagerSwiglu:
    """Return the kernel."""
    return EagerSwiglu()
