"""RMSNorm as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_ops.functional import rms_norm

__all__ = ["RMSNorm", "epsilon_of"]


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension by `ascend_ops.rms_norm`.

    Takes the place of torch's: the state dict of either loads into the other. It is computed in
    FP32 and rounded once, its result has the dtype of its input whatever the weight's is, and
    backward needs the input and the weight alone.

    Args:
        hidden: The size of the last dimension.
        eps: Added to the mean of squares. None is the machine epsilon of what it is computed in,
            as it is in torch.
        unit_offset: Multiply by `1 + weight`, as models of Gemma do. The weight starts as zeros
            then, else as ones.
        elementwise_affine: Whether there is a weight.
        device: Of the weight.
        dtype: Of the weight.
        backend: See `ascend_ops.rms_norm`.

    Raises:
        ConfigError: When `hidden` is several dimensions.
    """

    def __init__(
        self,
        hidden: int | Sequence[int],
        eps: float | None = 1e-6,
        unit_offset: bool = False,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        sizes = [hidden] if isinstance(hidden, int) else list(hidden)
        if len(sizes) != 1:
            raise ConfigError(
                f"RMSNorm was given the dimensions {sizes} to normalise.",
                why="the operator normalises the last dimension alone.",
                instead="flatten them into one, or use torch.nn.RMSNorm.",
            )
        self.unit_offset = unit_offset  # which resetting the weight, in torch's __init__, asks for
        super().__init__(sizes, eps, elementwise_affine, device, dtype)
        self.backend = backend

    def reset_parameters(self) -> None:
        """Make the weight the one that changes nothing."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of shape [..., hidden], in FP32, BF16, FP16 or FP64.

        Returns:
            A contiguous tensor of x's shape and dtype.

        Raises:
            ConfigError: When the last dimension is not of size `hidden`, or `backend` refuses the
                call.
            UnavailableError: When `backend` cannot be used on this machine.
        """
        eps = epsilon_of(self.eps, x.dtype)
        if self.weight is None and x.shape[-1:] != self.normalized_shape:
            raise ConfigError(
                f"RMSNorm was given x of shape {list(x.shape)}.",
                why=f"it was made for a last dimension of {self.normalized_shape[0]}.",
                instead="give it one, or make the module for the size of x.",
            )
        return rms_norm(x, self.weight, eps, unit_offset=self.unit_offset, backend=self.backend)

    def extra_repr(self) -> str:
        """The arguments that were given, as torch's module shows them."""
        shown: str = super().extra_repr()
        if self.unit_offset:
            shown += ", unit_offset=True"
        return shown if self.backend is None else f"{shown}, backend={self.backend!r}"


def epsilon_of(eps: float | None, dtype: torch.dtype) -> float:
    """What is added where `eps` is None: as in torch, the epsilon of what it is computed in."""
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
