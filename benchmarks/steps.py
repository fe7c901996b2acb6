"""The step that the benchmarks of recompute time: forward and backward of one input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ascend_core.device import current_backend
from ascend_core.testing import held_bytes
from benchmarks.case import Variant

__all__ = ["Forward", "forward_and_backward", "random_input"]

Forward = Callable[[Tensor], Tensor]


def random_input(tokens: int, hidden: int) -> Tensor:
    """An input that requires grad, of shape [tokens, hidden], on the device of the benchmarks."""
    return torch.randn(tokens, hidden, device=current_backend().device(), requires_grad=True)


def forward_and_backward(forward: Forward, x: Tensor) -> Variant:
    """A variant that steps, and whose bytes are those held between forward and backward."""

    def step() -> None:
        forward(x.detach().requires_grad_()).sum().backward()

    return Variant(step, lambda: held_bytes(lambda: forward(x)))
