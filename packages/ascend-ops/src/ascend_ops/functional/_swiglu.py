"""SwiGLU: what it is given is checked here, and computed in `_operators.swiglu`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_ops._checks import check_dtype, check_same
from ascend_ops._operators import swiglu as operator

__all__ = ["call_of_swiglu", "call_of_swiglu_pair", "swiglu", "swiglu_pair"]


def swiglu(
    x: Tensor,
    dim: int = -1,
    *,
    bias: Tensor | None = None,
    limit: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gate one half of a tensor by the other: `silu(gate) * up` with `gate, up = x.chunk(2, dim)`.

    Backward needs `x` (and `bias`) alone: what plain PyTorch saves for it, silu's output, is
    computed again. In BF16 and FP16 the numbers are those of `F.silu(gate) * up`, which rounds
    after silu and after the product; see the documentation for each backend.

    Args:
        x: Of shape [..., 2 N, ...], where 2 N is the size of `dim`; FP32, BF16, FP16 or FP64, with
            any strides.
        dim: The dimension that holds gate and up, gate first.
        bias: Of shape [2 N], added to `x` along `dim` first and rounded to x's dtype.
        limit: Clamps gate to at most `limit`, and up to between `-limit` and `limit`, after the
            bias. Where they are beyond, their gradient is zero. One that no finite number of x's
            dtype exceeds is as none.
        backend: `"eager"`, `"cpu"`, `"triton"` or `"npu"`; the best for this call when left out.

    Returns:
        A contiguous tensor of shape [..., N, ...], in x's dtype.

    Raises:
        ConfigError: When the size of `dim` is odd, or an argument is of a wrong kind, or `backend`
            refuses the call.
        UnavailableError: When `backend` cannot be used on this machine.

    Example:
        >>> y = down(ascend_ops.swiglu(gate_and_up(x)))
    """
    *_, limit = call_of_swiglu(x, dim, bias=bias, limit=limit)
    result: Tensor = operator.swiglu(x, dim, bias, limit, backend)
    return result


def swiglu_pair(
    gate: Tensor, up: Tensor, *, limit: float | None = None, backend: str | None = None
) -> Tensor:
    """Gate one tensor by another: `silu(gate) * up`. Backward needs the two alone.

    Args:
        gate: Of any shape and strides; FP32, BF16, FP16 or FP64.
        up: Of the same shape, dtype and device.
        limit: See `swiglu`.
        backend: See `swiglu`.

    Returns:
        A contiguous tensor of gate's shape and dtype.

    Raises:
        ConfigError: When shape, dtype or device differ, or `backend` refuses the call.
        UnavailableError: When `backend` cannot be used on this machine.
    """
    *_, limit = call_of_swiglu_pair(gate, up, limit=limit)
    result: Tensor = operator.swiglu_pair(gate, up, limit, backend)
    return result


def call_of_swiglu(
    x: Tensor, dim: int = -1, *, bias: Tensor | None = None, limit: float | None = None
) -> tuple[Any, ...]:
    """Check a call of `swiglu`; return a tensor of it, and what its kernels are given."""
    check_dtype("swiglu", x=x, bias=bias)
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(
            f"swiglu: x has no dimension {dim}.",
            why=f"its shape is {list(x.shape)}.",
            instead="name the dimension that holds gate and up.",
        )
    if x.shape[dim] % 2:
        raise ConfigError(
            f"swiglu: dimension {dim} of x has {x.shape[dim]} elements.",
            why="it holds gate and up, of one size each, so their number is even.",
            instead="make it twice the size of the result.",
        )
    if bias is not None:
        check_same("swiglu", "device", x=x, bias=bias)
        if bias.shape != (x.shape[dim],):
            raise ConfigError(
                f"swiglu: bias has the shape {list(bias.shape)}.",
                why="it is added to x along the dimension that holds gate and up.",
                instead=f"give it the shape [{x.shape[dim]}].",
            )
    return x, (x,), dim, bias, _checked_limit("swiglu", limit, x.dtype)


def call_of_swiglu_pair(gate: Tensor, up: Tensor, *, limit: float | None = None) -> tuple[Any, ...]:
    """Check a call of `swiglu_pair`; return a tensor of it, and what its kernels are given."""
    check_dtype("swiglu_pair", gate=gate, up=up)
    for what in ("shape", "dtype", "device"):
        check_same("swiglu_pair", what, gate=gate, up=up)
    limit = _checked_limit("swiglu_pair", limit, gate.dtype)
    return gate, (gate, up), -1, None, limit


def _checked_limit(function: str, limit: float | None, dtype: torch.dtype) -> float | None:
    """The limit; None, as it changes nothing, where no number of this dtype is above it."""
    if limit is not None and not limit > 0:
        raise ConfigError(
            f"{function}: limit is {limit}.",
            why="gate is clamped to at most it, and up to between minus it and it.",
            instead="use a number above 0, or leave it out.",
        )
    return None if limit is None or limit > torch.finfo(dtype).max else limit
