"""Rotary position embedding: pairs of elements, turned by an angle each.

Its gradient is the turn back, which is the operator again: it needs the angles alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ascend_ops._backends import choose
from ascend_ops._operators._library import define

__all__ = ["RotaryKernel", "rotary"]


class RotaryKernel(Protocol):
    """How a backend computes it.

    In both, `x` is of shape [..., D] and any strides; `cos` and `sin` are of one shape and dtype
    and can be broadcast to [..., n], where 2 n is at most D. The pairs are elements i and n + i of
    the first 2 n or, `interleaved`, elements 2 i and 2 i + 1. With `inverse`, -sin is meant.
    """

    def refusal(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> str | None:
        """Why this call cannot be taken; None where it can be."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> Tensor:
        """Return the result, contiguous, in the dtype of x; elements beyond 2 n are as they are."""


def _compute(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, backend: str | None
) -> Tensor:
    kernel: RotaryKernel
    _, kernel = choose("rotary", backend, x, x, cos, sin, interleaved, inverse)
    return kernel.forward(x, cos, sin, interleaved, inverse)


def _fake(x: Tensor, *options: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    interleaved, inverse, backend = ctx.options
    return rotary(grad, cos, sin, interleaved, not inverse, backend), *[None] * 5


rotary = define(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse, str? backend)"
    " -> Tensor",
    _compute,
    _fake,
    save=_save,
    backward=_backward,
)
