"""Rotary position embedding as a module.

[Note: no table]
Angles are computed from the positions with every call: a few operators over [tokens, pairs], once
for a model whose layers share them. What other modules keep (a buffer of inverse frequencies, a
table of cosines) is rounded by `model.bfloat16()`, after which position 4095 is turned by another
angle altogether; is made of nothing under `torch.device("meta")`; and has to grow with the
sequence, be moved, and be kept out of checkpoints. Here there is nothing to go wrong.

[Note: the phase]
In FP32 the inverse frequency and its product with the position are rounded to 24 bits each: an
angle is off by up to `position * 2 ** -23` radians, 5e-4 at position 4095 and 0.016 at 131 071, and
positions above 2 ** 24 are no longer told apart. Models are trained with these angles, so they are
what is right for a checkpoint. FP64 is for those that are trained anew on longer sequences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ascend_core.errors import ConfigError
from ascend_ops.functional import rotary

__all__ = ["RotaryEmbedding"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by angles that grow with their positions; see `ascend_ops.rotary`.

    Pair i at position p is turned by `p * base ** (-2 i / dim) / scaling`. The phase is computed in
    FP32 whatever dtype the model is cast to. There are neither parameters nor buffers, and nothing
    in the state dict.

    Args:
        dim: How many elements of a head are turned, the first ones: at most its size, and even.
        base: Of the series of frequencies (`rope_theta`).
        scaling: Divides all frequencies: the factor of linear position interpolation.
        interleaved: The pairs are neighbours; see `ascend_ops.rotary`.
        heads_dim: The dimension of queries and keys that holds the heads, counted from the last:
            -3 for [B, H, S, D], -2 for [B, S, H, D].
        phase_dtype: In what the phase is computed. FP32 is what models of Llama and most others are
            trained with; in FP64, for devices that have it, cosine and sine are right to the last
            bit of FP32 at any position.
        backend: See `ascend_ops.rotary`.

    Raises:
        ConfigError: When an argument cannot be right.

    Example:
        >>> q, k = RotaryEmbedding(64)(q, k, torch.arange(q.shape[-2]))
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        scaling: float = 1.0,
        interleaved: bool = False,
        heads_dim: int = -3,
        phase_dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        _check(dim, base, scaling, heads_dim, phase_dtype)
        self.dim = dim
        self.base = base
        self.scaling = scaling
        self.interleaved = interleaved
        self.heads_dim = heads_dim
        self.phase_dtype = phase_dtype
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries and keys.

        Args:
            q: Of shape [B, H, S, D] or [B, S, H, D], see `heads_dim`; FP32, BF16, FP16 or FP64.
            k: The same, with a number of heads of its own.
            positions: Of shape [S] or [B, S], any integer dtype, on the device of q.

        Returns:
            q and k, turned: contiguous, in the shape and dtype of each.

        Raises:
            ConfigError: When positions are no integers or do not fit, or `backend` refuses.
            UnavailableError: When `backend` cannot be used on this machine.
        """
        if positions.dim() not in (1, 2):
            raise ConfigError(
                f"RotaryEmbedding: positions are of shape {list(positions.shape)}.",
                why="there is one for each token of q and k.",
                instead="pass them as [S] or [B, S], one position as [1]; for other layouts call "
                "ascend_ops.rotary with what angles() returns.",
            )
        cos, sin = (part.unsqueeze(self.heads_dim) for part in self.angles(positions))
        options = {"interleaved": self.interleaved, "backend": self.backend}
        return rotary(q, cos, sin, **options), rotary(k, cos, sin, **options)  # type: ignore[arg-type]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles: for layers that share them.

        Args:
            positions: Of any shape [...] and integer dtype.

        Returns:
            Two tensors of shape [..., dim / 2], FP32, on the device of the positions.

        Raises:
            ConfigError: When positions are no integers.
        """
        if positions.dtype not in _INTEGERS:
            raise ConfigError(
                f"RotaryEmbedding: positions are {positions.dtype}.",
                why="they count tokens; in BF16 not even 257 is a number.",
                instead="pass integers, as torch.arange makes them; interpolate by `scaling`.",
            )
        exponents = torch.arange(0, self.dim, 2, device=positions.device).to(self.phase_dtype)
        frequencies = 1.0 / (self.base ** (exponents / self.dim)) / self.scaling
        phase = positions.to(self.phase_dtype).unsqueeze(-1) * frequencies
        return phase.cos().float(), phase.sin().float()

    def extra_repr(self) -> str:
        """The arguments that matter to the result."""
        return (
            f"{self.dim}, base={self.base}, scaling={self.scaling}, interleaved={self.interleaved}"
        )


def _check(dim: int, base: float, scaling: float, heads_dim: int, phase_dtype: torch.dtype) -> None:
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"RotaryEmbedding: dim is {dim}.",
            why="elements are turned in pairs.",
            instead="use an even number, at most the size of a head.",
        )
    for name, value in (("base", base), ("scaling", scaling)):
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"RotaryEmbedding: {name} is {value}.",
                why="frequencies are powers of the base, divided by the scaling.",
                instead="use a number above 0.",
            )
    if heads_dim not in (-2, -3):
        raise ConfigError(
            f"RotaryEmbedding: heads_dim is {heads_dim}.",
            why="heads are in the second or third dimension from the last.",
            instead="use -3 for [B, H, S, D] and -2 for [B, S, H, D]; for other layouts call "
            "ascend_ops.rotary with what angles() returns.",
        )
    if phase_dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"RotaryEmbedding: phase_dtype is {phase_dtype}.",
            why="angles of late positions have no digits left in fewer bits.",
            instead="use torch.float32, or torch.float64.",
        )
