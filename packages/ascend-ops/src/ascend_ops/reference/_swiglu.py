"""SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6, without the matrices)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ascend_ops.reference._precision import wide

__all__ = ["swiglu", "swiglu_pair"]


def swiglu(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, limit: float | None = None
) -> Tensor:
    """`silu(gate) * up` for the halves gate, up of `x + bias`; see `ascend_ops.swiglu`."""
    wider = wide(x)
    if bias is not None:
        shape = [1] * x.dim()
        shape[dim] = -1
        wider = wider + wide(bias).view(shape)
    gate, up = wider.chunk(2, dim)
    return _product(gate, up, limit).to(x.dtype)


def swiglu_pair(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """`silu(gate) * up`; see `ascend_ops.swiglu_pair`."""
    return _product(wide(gate), wide(up), limit).to(gate.dtype)


def _product(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
