"""The codec as `torch.compile` makes it: the same integers in a few fused loops.

Exceptions are a byte each between two loops, and eight of them a word in the next: a loop that
packs bits as it goes is not vectorized, and takes ten times as long.

[Note: whole blocks alone] What is compiled is compiled again for each new relation between sizes
(one element, a multiple of 8, a multiple of a block), and given up after a few. So it gets whole
blocks, two at least, which all have the same relations; the rest goes to torch's operators.
"""

from __future__ import annotations

import torch

from ascend_core.optim.arena import Arena, aligned
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED
from ascend_reuse_param._kernels.eager import COPIES, DIAGONAL, GATHER, EagerCodec

__all__ = ["CompiledCodec"]


class CompiledCodec:
    """Splits and joins in loops that `torch.compile` generates at the first call.

    What is generated may allocate too, up to 4 bytes per 64 elements.

    Args:
        device: Where the tensors are.
        rounding: See `_bits`.
    """

    def __init__(self, device: torch.device, rounding: Rounding = "nearest-even") -> None:
        self.rounding: Rounding = rounding
        self._weighted = torch.tensor(WEIGHTED, dtype=torch.int64, device=device)
        self._plain = torch.tensor(PLAIN, dtype=torch.int64, device=device)
        loops = (_split, _pack, _fingerprint, _unpack, _same, _join)
        compiled = (torch.compile(loop, dynamic=True, fullgraph=True) for loop in loops)
        self._split, self._pack, self._fingerprint, self._unpack, self._same, self._join = compiled
        self._eager = EagerCodec(device, rounding)

    def scratch_bytes(self, numel: int) -> int:
        """How much of an arena `split` or `join` takes; all of it is given back."""
        whole = _whole(numel)
        compiled = aligned(whole) + aligned(whole // BLOCK * 4)
        return max(compiled, self._eager.scratch_bytes(numel - whole))

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        whole = _whole(master.numel())
        if whole:
            with scratch.passing():
                self._split_blocks(master[:whole], weight[:whole], parts.cut(0, whole), scratch)
        rest = parts.cut(whole, master.numel())
        self._eager.split(master[whole:], weight[whole:], rest, scratch)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        whole = _whole(master.numel())
        if whole:
            with scratch.passing():
                self._join_blocks(weight[:whole], parts.cut(0, whole), master[:whole], scratch)
        rest = parts.cut(whole, master.numel())
        self._eager.join(weight[whole:], rest, master[whole:], scratch)

    def _split_blocks(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        bits, halves = master.view(torch.int32), weight.view(torch.int16)
        if parts.bitmap is None:
            self._split(bits, halves, parts.residual, None)
        else:
            marks = scratch.take(master.numel(), torch.uint8)
            self._split(bits, halves, parts.residual, marks)
            self._pack(marks.view(torch.int64), parts.bitmap)
        self._fingerprint(halves, self._weighted, self._plain, parts.fingerprints)

    def _join_blocks(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        bits, halves = master.view(torch.int32), weight.view(torch.int16)
        same = scratch.take(master.numel() // BLOCK, torch.int32)
        self._same(halves, self._weighted, self._plain, parts.fingerprints, same)
        marks = None
        if parts.bitmap is not None:
            marks = scratch.take(master.numel(), torch.uint8)
            self._unpack(parts.bitmap, marks.view(torch.int64))
            marks = marks.view(-1, BLOCK)
        high, low, out = (t.view(-1, BLOCK) for t in (halves, parts.residual, bits))
        self._join(high, low, marks, same, out)


def _whole(numel: int) -> int:
    """How many elements are compiled."""
    return numel // BLOCK * BLOCK if numel >= 2 * BLOCK else 0


def _split(
    bits: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, marks: torch.Tensor | None
) -> None:
    magnitude, low, high = bits & 0x7FFFFFFF, bits & 0xFFFF, bits >> 16
    nan = magnitude > 0x7F800000
    if marks is None:
        up = low >= 0x8000
    else:
        tie = ((bits & 0x1FFFF) == 0x18000) & ~nan
        up = (low > 0x8000) | tie
        marks.copy_((tie | (nan & (magnitude < 0x7FC00000))).to(torch.uint8))
    weight.copy_(torch.where(nan, high | 0x40, high + up.to(torch.int32)).to(torch.int16))
    residual.copy_(bits.to(torch.int16))


def _pack(eights: torch.Tensor, bitmap: torch.Tensor) -> None:
    bitmap.copy_((eights * GATHER >> 56) & 0xFF)


def _unpack(bitmap: torch.Tensor, eights: torch.Tensor) -> None:
    eights.copy_((bitmap.to(torch.int64) * COPIES) & DIAGONAL)


def _fingerprint(
    weight: torch.Tensor, weighted: torch.Tensor, plain: torch.Tensor, out: torch.Tensor
) -> None:
    out.copy_(_fingerprints(weight, weighted, plain))


def _same(
    weight: torch.Tensor,
    weighted: torch.Tensor,
    plain: torch.Tensor,
    expected: torch.Tensor,
    out: torch.Tensor,
) -> None:
    out.copy_(_fingerprints(weight, weighted, plain) == expected)


def _fingerprints(
    weight: torch.Tensor, weighted: torch.Tensor, plain: torch.Tensor
) -> torch.Tensor:
    blocks = weight.view(-1, SIDE, SIDE).to(torch.int32)
    rows = torch.arange(SIDE, 0, -1, dtype=torch.int32, device=weight.device).unsqueeze(1)
    sums = blocks.sum(1, dtype=torch.int32).to(torch.int64)
    of_rows = (blocks * rows).sum(1, dtype=torch.int32).to(torch.int64)
    return (of_rows * weighted + sums * plain).sum(1)


def _join(
    weight: torch.Tensor,
    residual: torch.Tensor,
    marks: torch.Tensor | None,
    same: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    high = weight.to(torch.int32)
    low = residual.to(torch.int32) * same.unsqueeze(1)
    nan = (high & 0x7FFF) > 0x7F80
    more = nan & (low < 0)
    if marks is None:
        bits.copy_(((high + more.to(torch.int32)) << 16) + low)
        return
    exception = marks.to(torch.int32) * same.unsqueeze(1) != 0
    more = more | ((low == -0x8000) & ~exception)
    signalling = (nan & exception).to(torch.int32) << 22
    bits.copy_(((high + more.to(torch.int32)) << 16) + low - signalling)
