"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34)."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_ops.reference._precision import wide

__all__ = ["rotary"]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs `(a, b)` to `(a cos - b sin, b cos + a sin)`; see `ascend_ops.rotary`."""
    pairs = cos.shape[-1]
    turned, left = wide(x[..., : 2 * pairs]), x[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    cos, sin = wide(cos), wide(sin)
    both = a * cos - b * sin, b * cos + a * sin
    result = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((result.to(x.dtype), left), -1)
