"""Rotary embedding: what it is given is checked here, and computed in `_operators.rotary`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_ops._checks import check_dtype, check_same
from ascend_ops._operators import rotary as operator

__all__ = ["call_of_rotary", "rotary"]


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Turn pairs of elements by angles: rotary position embedding, for queries or keys.

    A pair `(a, b)` becomes `(a cos - b sin, b cos + a sin)`, computed in FP32 and rounded once.
    The gradient is the turn back, so that backward needs `cos` and `sin` alone. `x` stays as it is.

    Args:
        x: Of shape [..., D]; FP32, BF16, FP16 or FP64, with any strides.
        cos: Cosines of the angles, one for each pair: of shape [..., n] that can be broadcast to
            that of `x` without its last dimension, where 2 n is at most D; any floating dtype, best
            FP32. What is left of D beyond 2 n is not turned. **Where a model repeats its
            angles, to as many as there are elements, pass the first half of them (every second
            one where they are interleaved).**
        sin: Their sines; of the shape, dtype and device of `cos`.
        interleaved: The pairs are neighbours, `(x[2 i], x[2 i + 1])`. Otherwise they are
            `(x[i], x[n + i])`, as models of Llama and most others have it.
        backend: `"eager"`, `"cpu"`, `"triton"` or `"npu"`; the best for this call when left out.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ConfigError: When shapes do not fit, an argument is of a wrong kind, a gradient of the
            angles is asked for, or `backend` refuses the call.
        UnavailableError: When `backend` cannot be used on this machine.
    """
    call_of_rotary(x, cos, sin, interleaved=interleaved)
    result: Tensor = operator.rotary(x, cos, sin, interleaved, False, backend)
    return result


def call_of_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Any, ...]:
    """Check a call of `rotary`; return a tensor of it, and what its kernels are given."""
    check_dtype("rotary", x=x, cos=cos, sin=sin)
    for what in ("shape", "dtype"):
        check_same("rotary", what, cos=cos, sin=sin)
    check_same("rotary", "device", x=x, cos=cos, sin=sin)
    _check_shapes(x, cos)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ConfigError(
            "rotary: cos or sin requires a gradient.",
            why="angles come from positions, and nothing of x is kept that theirs would need.",
            instead="pass cos.detach() and sin.detach(), or use ascend_ops.reference.rotary.",
        )
    return x, x, cos, sin, interleaved, False


def _check_shapes(x: Tensor, cos: Tensor) -> None:
    if x.dim() == 0 or cos.dim() == 0 or 2 * cos.shape[-1] > x.shape[-1]:
        raise ConfigError(
            f"rotary: cos of shape {list(cos.shape)} turns more than x of shape {list(x.shape)} "
            "has.",
            why="there is one angle for each pair of elements of the last dimension.",
            instead="pass half as many angles as x has elements there, or fewer; where they are "
            "repeated to as many, take the first half (interleaved: every second one).",
        )
    sizes = zip(reversed(x.shape[:-1]), reversed(cos.shape[:-1]), strict=False)
    if cos.dim() > x.dim() or any(theirs not in (1, ours) for ours, theirs in sizes):
        raise ConfigError(
            f"rotary: cos of shape {list(cos.shape)} cannot be broadcast to x of shape "
            f"{list(x.shape)}.",
            why="all dimensions but the last are those of x, or 1.",
            instead="insert dimensions of size 1 where x has heads or a batch, for example with "
            "cos.unsqueeze(-2).",
        )
