"""Rotary embedding by torch's operators, in FP32 (FP64 for FP64), rounded once."""

from __future__ import annotations

from torch import Tensor

from ascend_ops import reference

__all__ = ["EagerRotary", "load"]


class EagerRotary:
    """See `ascend_ops._operators.rotary.RotaryKernel`."""

    def refusal(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> str | None:
        """Takes everything."""
        return None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> Tensor:
        """See the protocol."""
        sin = -sin if inverse else sin
        return reference.rotary(x, cos, sin, interleaved=interleaved).contiguous()


def load() -> EagerRotary:
    """Return the kernel."""
    return EagerRotary()
