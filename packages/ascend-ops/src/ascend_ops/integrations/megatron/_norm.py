"""RMSNorm in the form in which megatron-core builds a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_ops.functional import rms_norm

__all__ = ["FusedRMSNorm", "check_rms_norm"]


class FusedRMSNorm(nn.Module):
    """RMSNorm by `ascend_ops.rms_norm`. Its one parameter is `weight`, as that of torch's.

    It works on a part of the sequence too: the weight says so (`weight.sequence_parallel`), and
    megatron-core then sums its gradient over the ranks of tensor parallelism.

    Args:
        config: The `TransformerConfig`. Of it count `normalization`, `sequence_parallel`, and
            `layernorm_zero_centered_gamma`, with which 1 is added to the weight, in FP32.
        hidden_size: Of the last dimension.
        eps: See `ascend_ops.rms_norm`.
        backend: See `ascend_ops.rms_norm`.
        options: What megatron-core's other norms are given beside, and do not use.

    Raises:
        ConfigError: When the config wants another normalization.
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_rms_norm(config)
        self.config = config
        self.eps = eps
        self.backend = backend
        self.unit_offset: bool = config.layernorm_zero_centered_gamma
        fill = torch.zeros if self.unit_offset else torch.ones
        self.weight = nn.Parameter(fill(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, [..., hidden_size]; the result is of its dtype."""
        return rms_norm(
            x, self.weight, self.eps, unit_offset=self.unit_offset, backend=self.backend
        )


def check_rms_norm(config: Any) -> None:
    """Refuse a `TransformerConfig` whose norms are others.

    Raises:
        ConfigError: When they are.
    """
    if config.normalization != "RMSNorm":
        raise ConfigError(
            f"rms_norm cannot compute the model's norms: normalization is "
            f"{config.normalization!r}.",
            why="it computes RMSNorm alone.",
            instead='use normalization="RMSNorm", or leave "rms_norm" out of operators '
            "(--use-fused-rmsnorm).",
        )
