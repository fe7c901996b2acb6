"""RMSNorm: what it is given is checked here, and computed in `_operators.rms_norm`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascend_core.errors import ConfigError
from ascend_ops._checks import check_dtype, check_same
from ascend_ops._operators import rms_norm as operator

__all__ = ["call_of_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    unit_offset: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Normalise the last dimension: `x / sqrt(mean(x ** 2) + eps) * weight`.

    Computed in FP32 and rounded once, at the end. Backward needs `x` and `weight` alone: what plain
    PyTorch saves beside them is computed again.

    Args:
        x: Of shape [..., D]; FP32, BF16, FP16 or FP64, with any strides.
        weight: Of shape [D], in a dtype of its own; as if it were all ones when left out.
        eps: Added to the mean of squares.
        unit_offset: Multiply by `1 + weight`, as models of Gemma do; the sum is made in FP32.
        backend: `"eager"`, `"cpu"`, `"triton"` or `"npu"`; the best for this call when left out.

    Returns:
        A contiguous tensor of x's shape and dtype, whatever the weight's dtype is.

    Raises:
        ConfigError: When shapes do not fit, an argument is of a wrong kind, or `backend` refuses
            the call.
        UnavailableError: When `backend` cannot be used on this machine.
    """
    call_of_rms_norm(x, weight, eps, unit_offset=unit_offset)
    result: Tensor = operator.rms_norm(x, weight, eps, unit_offset, backend)
    return result


def call_of_rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, unit_offset: bool = False
) -> tuple[Any, ...]:
    """Check a call of `rms_norm`; return a tensor of it, and what its kernels are given."""
    check_dtype("rms_norm", x=x, weight=weight)
    if x.dim() == 0:
        raise ConfigError(
            "rms_norm: x is a single number.",
            why="its last dimension is what is normalised.",
            instead="give it at least one dimension.",
        )
    if weight is not None:
        check_same("rms_norm", "device", x=x, weight=weight)
        if weight.shape != x.shape[-1:]:
            raise ConfigError(
                f"rms_norm: weight has the shape {list(weight.shape)}.",
                why=f"the last dimension of x, which is normalised, has {x.shape[-1]} elements.",
                instead=f"give it the shape [{x.shape[-1]}].",
            )
    if not eps >= 0:
        raise ConfigError(
            f"rms_norm: eps is {eps}.",
            why="it is added to a mean of squares, of which a root is taken.",
            instead="use a small number that is not negative, for example 1e-6.",
        )
    return x, x, weight, eps, unit_offset
