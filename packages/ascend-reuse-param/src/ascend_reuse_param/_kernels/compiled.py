"""The codec as `torch.compile` makes it: the same integers in a few fused loops.

What it generates reads the arrays more often than the C does (the fingerprint is a reduction of its
own), and it allocates what lies between the loops itself: an allocation can fail in a step.

[Note: whole blocks alone] What is compiled is compiled again for each new relation between sizes
(one element, a multiple of 8, a multiple of a block), and given up after a few. So it gets whole
blocks, two at least, which all have the same relations; the rest goes to torch's operators.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED
from ascend_reuse_param._kernels.eager import EagerCodec

__all__ = ["CompiledCodec"]


class CompiledCodec:
    """Splits and joins in loops that `torch.compile` generates at the first call.

    Args:
        device: Where the tensors are.
        rounding: See `_bits`.
    """

    def __init__(self, device: torch.device, rounding: Rounding = "nearest-even") -> None:
        self.rounding: Rounding = rounding
        self._weighted = torch.tensor(WEIGHTED, dtype=torch.int64, device=device)
        self._plain = torch.tensor(PLAIN, dtype=torch.int64, device=device)
        # For any number of elements: slices of parameters have many sizes.
        self._split = torch.compile(_split, dynamic=True, fullgraph=True)
        self._join = torch.compile(_join, dynamic=True, fullgraph=True)
        self._eager = EagerCodec(device, rounding)

    def scratch_bytes(self, numel: int) -> int:
        """What torch's operators take for the rest: what is compiled allocates what it needs."""
        return self._eager.scratch_bytes(numel - _whole(numel))

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        whole = _whole(master.numel())
        if whole:
            first = parts.cut(0, whole)
            self._split(
                master[:whole].view(torch.int32),
                weight[:whole].view(torch.int16),
                first.residual,
                first.bitmap,
                first.fingerprints,
                first.count,
                self._weighted,
                self._plain,
            )
        rest = parts.cut(whole, master.numel())
        self._eager.split(master[whole:], weight[whole:], rest, scratch)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        whole = _whole(master.numel())
        if whole:
            first = parts.cut(0, whole)
            self._join(
                weight[:whole].view(torch.int16),
                first.residual,
                first.bitmap,
                first.fingerprints,
                self._weighted,
                self._plain,
                master[:whole].view(torch.int32),
            )
        rest = parts.cut(whole, master.numel())
        self._eager.join(weight[whole:], rest, master[whole:], scratch)


def _whole(numel: int) -> int:
    """How many elements are compiled."""
    return numel // BLOCK * BLOCK if numel >= 2 * BLOCK else 0


def _split(
    bits: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bitmap: torch.Tensor | None,
    fingerprints: torch.Tensor,
    count: torch.Tensor,
    weighted: torch.Tensor,
    plain: torch.Tensor,
) -> None:
    magnitude, low, high = bits & 0x7FFFFFFF, bits & 0xFFFF, bits >> 16
    nan = magnitude > 0x7F800000
    if bitmap is None:
        up = low >= 0x8000
    else:
        tie = ((bits & 0x1FFFF) == 0x18000) & ~nan
        up = (low > 0x8000) | tie
        exception = tie | (nan & (magnitude < 0x7FC00000))
        bitmap.copy_(_packed(exception))
        count.add_(exception.sum())
    made = torch.where(nan, high | 0x40, high + up.to(torch.int32)).to(torch.int16)
    weight.copy_(made)
    residual.copy_(bits.to(torch.int16))
    fingerprints.copy_(_fingerprints(made, weighted, plain))


def _join(
    weight: torch.Tensor,
    residual: torch.Tensor,
    bitmap: torch.Tensor | None,
    fingerprints: torch.Tensor,
    weighted: torch.Tensor,
    plain: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    numel = weight.numel()
    same = _fingerprints(weight, weighted, plain) == fingerprints
    same = same.unsqueeze(1).expand(-1, BLOCK).reshape(-1)[:numel]
    high = weight.to(torch.int32)
    low = torch.where(same, residual.to(torch.int32), 0)
    nan = (high & 0x7FFF) > 0x7F80
    more = nan & (low < 0)
    joined_quiet = torch.zeros_like(low)
    if bitmap is not None:
        exception = _unpacked(bitmap, numel) & same
        more = more | ((low == -0x8000) & ~exception)
        joined_quiet = (nan & exception).to(torch.int32) << 22
    bits.copy_(((high + more.to(torch.int32)) << 16) + low - joined_quiet)


def _packed(marks: torch.Tensor) -> torch.Tensor:
    eights = pad(marks.to(torch.int32), (0, -marks.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.int32, device=marks.device)
    return (eights << places).sum(1, dtype=torch.int32).to(torch.uint8)


def _unpacked(bitmap: torch.Tensor, numel: int) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.int32, device=bitmap.device)
    marks = bitmap.to(torch.int32).unsqueeze(1) >> places & 1
    return marks.view(-1)[:numel] != 0


def _fingerprints(
    weight: torch.Tensor, weighted: torch.Tensor, plain: torch.Tensor
) -> torch.Tensor:
    blocks = pad(weight, (0, -weight.numel() % BLOCK)).view(-1, SIDE, SIDE).to(torch.int32)
    rows = torch.arange(SIDE, 0, -1, dtype=torch.int32, device=weight.device).unsqueeze(1)
    sums = blocks.sum(1, dtype=torch.int32).to(torch.int64)
    of_rows = (blocks * rows).sum(1, dtype=torch.int32).to(torch.int64)
    return (of_rows * weighted + sums * plain).sum(1)
