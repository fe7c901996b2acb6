"""Rotary embedding by `npu_rotary_mul`: computed in FP32 and rounded once.

[Note: what the operator has not]
* It wants as many angles as x has elements: each is repeated, which is little beside x.
* It turns all of the last dimension: what is left of it beyond the angles is copied.
* Its own backward wants x, for the gradients of the angles. Ours is the turn back, which is the
  operator with -sin, and keeps the angles alone.
* Angles of another dtype than x: all is computed in FP32, as angles are not to be rounded.

Its documentation wants angles between -1 and 1, which cannot be looked at without a wait for the
device: scaled ones, such as YaRN's, are the caller's to judge. The limits below are documented for
operators that are compiled beforehand (`torch.npu.set_compile_mode(jit_compile=False)`, torch_npu's
default on Atlas A2 and A3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_ops._kernels.npu._device import operators, refusal_of

__all__ = ["NpuRotary", "load"]

_WIDEST, _MOST = 896, 1000  # the last dimension is below the one, batch and heads below the other
# Where the sequence, the batch and the heads are in BNSD, BSND and SBND.
_LAYOUTS = ((2, 0, 1), (1, 0, 2), (0, 1, 2))


class NpuRotary:
    """See `ascend_ops._operators.rotary.RotaryKernel`.

    Args:
        npu: The operators of torch_npu.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu

    def refusal(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> str | None:
        """See the protocol."""
        if reason := refusal_of(x=x, cos=cos):
            return reason
        if x.dim() > 4:
            return f"x has {x.dim()} dimensions, and npu_rotary_mul takes 4."
        if 2 * cos.shape[-1] >= _WIDEST:
            return (
                f"{2 * cos.shape[-1]} elements of a head are turned, and npu_rotary_mul takes less "
                f"than {_WIDEST}."
            )
        if not x.numel() or not cos.numel():
            return None
        sizes, angles = _four(x).shape[:3], _four(cos).shape[:3]
        fits = _fits_interleaved if interleaved else _fits
        if not any(fits(sizes, angles, layout) for layout in _LAYOUTS):
            return (
                f"x is {list(x.shape)} and cos {list(cos.shape)}: of one layout of BNSD, BSND and "
                f"SBND, npu_rotary_mul takes angles that differ by position, and with "
                f"interleaved=False by batch or by batch and head, and batch and heads below "
                f"{_MOST} (interleaved: their product)."
            )
        return None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
    ) -> Tensor:
        """See the protocol."""
        turned = 2 * cos.shape[-1]
        if not x.numel() or not turned:
            return x.clone(memory_format=torch.contiguous_format)
        part = self._turn(x[..., :turned], cos, -sin if inverse else sin, interleaved)
        if turned == x.shape[-1]:
            return part
        return torch.cat((part, x[..., turned:]), -1)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        mode = "interleave" if interleaved else "half"
        r1, r2 = (_four(_repeated(angles, interleaved)) for angles in (cos, sin))
        dtype = x.dtype if x.dtype == cos.dtype else torch.float32
        whole = _four(x).to(dtype).contiguous()
        result: Tensor = self._npu.npu_rotary_mul(whole, r1.to(dtype), r2.to(dtype), mode)
        return result.to(x.dtype).view(x.shape)


def _four(x: Tensor) -> Tensor:
    """X with dimensions of size 1 in front, four in all."""
    return x[(None,) * (4 - x.dim())]


def _repeated(angles: Tensor, interleaved: bool) -> Tensor:
    """As many angles as elements."""
    return angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)


def _fits(sizes: Sequence[int], angles: Sequence[int], layout: Sequence[int]) -> bool:
    """Whether the operator takes such angles, when x has this layout: 11SD, B1SD or BNSD of BNSD.

    Args:
        sizes: Of x, without its last dimension.
        angles: The same of the angles: each is that of x, or 1.
        layout: Where the sequence, the batch and the heads are.
    """
    sequence, batch, heads = layout
    if angles[sequence] != sizes[sequence] or max(sizes[batch], sizes[heads]) >= _MOST:
        return False
    # 1NSD is not among them.
    return angles[heads] == 1 or (angles[heads] == sizes[heads] and angles[batch] == sizes[batch])


def _fits_interleaved(sizes: Sequence[int], angles: Sequence[int], layout: Sequence[int]) -> bool:
    """As `_fits`, of the other mode: 11SD of BNSD."""
    sequence, batch, heads = layout
    if angles[sequence] != sizes[sequence] or sizes[batch] * sizes[heads] >= _MOST:
        return False
    return angles[batch] == angles[heads] == 1


def load() -> NpuRotary:
    """Return the kernel.

    Raises:
        UnavailableError: When torch_npu cannot be imported.
    """
    return NpuRotary(operators())
