"""SwiGLU: `silu(gate) * up`, where gate and up are the halves of a tensor, or two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ascend_ops import reference
from ascend_ops._backends import choose
from ascend_ops._operators._library import define, differentiated_again

__all__ = ["SwigluKernel", "swiglu", "swiglu_pair"]


class SwigluKernel(Protocol):
    """How a backend computes it.

    In all three, `parts` is `(x,)`, whose halves along `dim` are gate and up, or `(gate, up)`, of
    one shape; of any strides. `bias` is added to x first, and goes with `(x,)` alone: its shape is
    [x.size(dim)]. `limit` is documented at `ascend_ops.swiglu`.
    """

    def refusal(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> str | None:
        """Why this call cannot be taken; None where it can be."""

    def forward(
        self, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
    ) -> Tensor:
        """Return the result, contiguous, in the dtype of the parts."""

    def backward(
        self,
        grad: Tensor,
        parts: Sequence[Tensor],
        dim: int,
        bias: Tensor | None,
        limit: float | None,
    ) -> tuple[Tensor, ...]:
        """Return the gradient of each part, contiguous. `grad` has any strides, 0 among them.

        The gradient of the bias is summed from that of x elsewhere.
        """


def _kernel(
    backend: str | None, parts: Sequence[Tensor], dim: int, bias: Tensor | None, limit: float | None
) -> SwigluKernel:
    kernel: SwigluKernel = choose("swiglu", backend, parts[0], parts, dim, bias, limit)[1]
    return kernel


def _half(x: Tensor, dim: int) -> Tensor:
    """An empty tensor of the shape of x's halves."""
    shape = list(x.shape)
    shape[dim] //= 2
    return x.new_empty(shape)


def _compute(
    x: Tensor, dim: int, bias: Tensor | None, limit: float | None, backend: str | None
) -> Tensor:
    return _kernel(backend, (x,), dim, bias, limit).forward((x,), dim, bias, limit)


def _fake(
    x: Tensor, dim: int, bias: Tensor | None, limit: float | None, backend: str | None
) -> Tensor:
    return _half(x, dim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, bias, ctx.limit, ctx.backend = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    x_grad = _swiglu_backward(grad, x, ctx.dim, bias, ctx.limit, ctx.backend)
    bias_grad = None
    if ctx.needs_input_grad[2]:
        others = [d for d in range(x.dim()) if d != ctx.dim % x.dim()]
        bias_grad = x_grad.sum(others) if others else x_grad  # sum([]) would be that of all
        bias_grad = bias_grad.to(bias.dtype)
    return x_grad, None, bias_grad, None, None


def _compute_backward(
    grad: Tensor,
    x: Tensor,
    dim: int,
    bias: Tensor | None,
    limit: float | None,
    backend: str | None,
) -> Tensor:
    return _kernel(backend, (x,), dim, bias, limit).backward(grad, (x,), dim, bias, limit)[0]


def _fake_backward(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, x, ctx.dim, bias, ctx.limit, _ = inputs
    ctx.save_for_backward(grad, x, bias)


def _backward_backward(ctx: Any, x_grad_grad: Tensor) -> tuple[Any, ...]:
    grad, x, bias = ctx.saved_tensors

    def formula(x: Tensor, bias: Tensor | None) -> Tensor:
        return reference.swiglu(x, ctx.dim, bias=bias, limit=ctx.limit)

    given = differentiated_again(formula, (x, bias), grad, (x_grad_grad, None))
    return given[0], given[1], None, given[2], None, None


_SHARED = "Tensor x, int dim, Tensor? bias, float? limit, str? backend"
swiglu = define(f"swiglu({_SHARED}) -> Tensor", _compute, _fake, save=_save, backward=_backward)
_swiglu_backward = define(
    f"swiglu_backward(Tensor grad, {_SHARED}) -> Tensor",
    _compute_backward,
    _fake_backward,
    save=_save_backward,
    backward=_backward_backward,
)


def _compute_pair(gate: Tensor, up: Tensor, limit: float | None, backend: str | None) -> Tensor:
    parts = (gate, up)
    return _kernel(backend, parts, -1, None, limit).forward(parts, -1, None, limit)


def _fake_pair(gate: Tensor, up: Tensor, limit: float | None, backend: str | None) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _save_pair(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.limit, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _backward_pair(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    return *_swiglu_pair_backward(grad, gate, up, ctx.limit, ctx.backend), None, None


def _compute_pair_backward(
    grad: Tensor, gate: Tensor, up: Tensor, limit: float | None, backend: str | None
) -> tuple[Tensor, ...]:
    parts = (gate, up)
    return _kernel(backend, parts, -1, None, limit).backward(grad, parts, -1, None, limit)


def _fake_pair_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return _fake_pair(gate, up, None, None), _fake_pair(up, gate, None, None)


def _save_pair_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, gate, up, ctx.limit, _ = inputs
    ctx.save_for_backward(grad, gate, up)


def _backward_pair_backward(ctx: Any, *grads_of_grads: Tensor | None) -> tuple[Any, ...]:
    grad, gate, up = ctx.saved_tensors

    def formula(gate: Tensor, up: Tensor) -> Tensor:
        return reference.swiglu_pair(gate, up, limit=ctx.limit)

    return *differentiated_again(formula, (gate, up), grad, grads_of_grads), None, None


_SHARED_PAIR = "Tensor gate, Tensor up, float? limit, str? backend"
swiglu_pair = define(
    f"swiglu_pair({_SHARED_PAIR}) -> Tensor",
    _compute_pair,
    _fake_pair,
    save=_save_pair,
    backward=_backward_pair,
)
_swiglu_pair_backward = define(
    f"swiglu_pair_backward(Tensor grad, {_SHARED_PAIR}) -> (Tensor, Tensor)",
    _compute_pair_backward,
    _fake_pair_backward,
    save=_save_pair_backward,
    backward=_backward_pair_backward,
)
