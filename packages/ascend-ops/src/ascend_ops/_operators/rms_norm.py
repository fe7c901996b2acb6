"""RMSNorm over the last dimension."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ascend_ops import reference
from ascend_ops._backends import choose
from ascend_ops._operators._library import define, differentiated_again

__all__ = ["RmsNormKernel", "rms_norm"]


class RmsNormKernel(Protocol):
    """How a backend computes it.

    In all three, `x` is of shape [..., D] and any strides, and `weight` of shape [D], in a dtype of
    its own, or None. With `unit_offset`, 1 is added to it in FP32.
    """

    def refusal(
        self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
    ) -> str | None:
        """Why this call cannot be taken; None where it can be."""

    def forward(self, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
        """Return the result, contiguous, in the dtype of x."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        unit_offset: bool,
        weight_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and of the weight, contiguous, in the dtypes of both.

        `grad` has any strides, 0 among them. The weight's is None where it is not asked for.
        """


def _kernel(
    backend: str | None, x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool
) -> RmsNormKernel:
    kernel: RmsNormKernel
    _, kernel = choose("rms_norm", backend, x, x, weight, eps, unit_offset)
    return kernel


def _compute(
    x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, backend: str | None
) -> Tensor:
    return _kernel(backend, x, weight, eps, unit_offset).forward(x, weight, eps, unit_offset)


def _fake(x: Tensor, *options: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.options = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    eps, unit_offset, backend = ctx.options
    wanted = ctx.needs_input_grad[1]
    x_grad, weight_grad = _rms_norm_backward(grad, x, weight, eps, unit_offset, wanted, backend)
    return x_grad, weight_grad if wanted else None, None, None, None


def _compute_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    weight_grad: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    kernel = _kernel(backend, x, weight, eps, unit_offset)
    x_grad, of_weight = kernel.backward(grad, x, weight, eps, unit_offset, weight_grad)
    return x_grad, x.new_empty(0) if of_weight is None else of_weight


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    weight_grad: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    wanted = weight_grad and weight is not None
    return _fake(x), torch.empty_like(weight) if wanted and weight is not None else x.new_empty(0)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, x, weight, ctx.eps, ctx.unit_offset, ctx.weight_grad, _ = inputs
    ctx.save_for_backward(grad, x, weight)


def _backward_backward(
    ctx: Any, x_grad_grad: Tensor | None, weight_grad_grad: Tensor | None
) -> tuple[Any, ...]:
    grad, x, weight = ctx.saved_tensors

    def formula(x: Tensor, weight: Tensor | None) -> Tensor:
        return reference.rms_norm(x, weight, ctx.eps, unit_offset=ctx.unit_offset)

    arriving = (x_grad_grad, weight_grad_grad if ctx.weight_grad else None)
    given = differentiated_again(formula, (x, weight), grad, arriving)
    return *given, None, None, None, None


_SHARED = "Tensor x, Tensor? weight, float eps, bool unit_offset"
rms_norm = define(
    f"rms_norm({_SHARED}, str? backend) -> Tensor", _compute, _fake, save=_save, backward=_backward
)
_rms_norm_backward = define(
    f"rms_norm_backward(Tensor grad, {_SHARED}, bool weight_grad, str? backend)"
    " -> (Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
    save=_save_backward,
    backward=_backward_backward,
)
