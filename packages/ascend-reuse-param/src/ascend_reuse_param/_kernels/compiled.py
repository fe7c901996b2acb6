"""The codec as `torch.compile` makes it: the same integers in a few fused loops.

[Note: 32 bits alone] A loop that loads or stores an integer of 16 bits, or stores one of 8, is not
vectorized on a CPU and takes up to ten times as long. So the loops work on integers of 32, a chunk
at a time, and torch's copies narrow and widen them while they are in a cache.

[Note: whole blocks alone] What is compiled is compiled again for each new relation between sizes
(one element, a multiple of 8, a multiple of a block), and given up after a few. So it gets whole
blocks, two at least, which all have the same relations; the rest goes to torch's operators.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ascend_core.optim.arena import Arena, aligned
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED
from ascend_reuse_param._kernels.eager import COPIES, DIAGONAL, GATHER, EagerCodec

__all__ = ["CompiledCodec"]

_CHUNK = 1 << 20  # elements: calling what is compiled takes as long as some 10 000 of them


class _Temporaries:
    """What a chunk of whole blocks needs, cut from an arena.

    Attributes:
        high: int32 [n], the weight's bits.
        low: int32 [n], the residual.
        marks: int32 [n], 1 for an exception.
        bytes: uint8 [n], the same.
        same: int32 [n / BLOCK, 1], 1 where a fingerprint is right.
    """

    def __init__(self, numel: int, scratch: Arena) -> None:
        self.high, self.low, self.marks = (scratch.take(numel, torch.int32) for _ in range(3))
        self.bytes = scratch.take(numel, torch.uint8)
        self.same = scratch.take(numel // BLOCK, torch.int32).unsqueeze(1)

    @staticmethod
    def nbytes(numel: int) -> int:
        """What an instance for so many elements cuts."""
        return 3 * aligned(numel * 4) + aligned(numel) + aligned(numel // BLOCK * 4)


class CompiledCodec:
    """Splits and joins in loops that `torch.compile` generates at the first call.

    Args:
        device: Where the tensors are.
        rounding: See `_bits`.
        chunk: How many elements to work on at a time, a multiple of `BLOCK`.
    """

    def __init__(
        self,
        device: torch.device,
        rounding: Rounding = "nearest-even",
        *,
        chunk: int = _CHUNK,
    ) -> None:
        self.rounding: Rounding = rounding
        assert chunk % BLOCK == 0 and chunk > BLOCK
        self._chunk = chunk
        self._weighted = torch.tensor(WEIGHTED, dtype=torch.int64, device=device)
        self._plain = torch.tensor(PLAIN, dtype=torch.int64, device=device)
        loops = (_split, _pack, _fingerprint, _unpack, _same, _join)
        compiled = (torch.compile(loop, dynamic=True, fullgraph=True) for loop in loops)
        self._split, self._pack, self._fingerprint, self._unpack, self._same, self._join = compiled
        self._eager = EagerCodec(device, rounding)

    def scratch_bytes(self, numel: int) -> int:
        """How much of an arena `split` or `join` takes; all of it is given back."""
        largest = max((stop - start for start, stop in _chunks(numel, self._chunk)), default=0)
        compiled = _Temporaries.nbytes(largest)
        return max(compiled, self._eager.scratch_bytes(numel - _whole(numel)))

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        for start, stop in _chunks(master.numel(), self._chunk):
            with scratch.passing():
                chunk = _Temporaries(stop - start, scratch)
                self._split_chunk(
                    master[start:stop], weight[start:stop], parts.cut(start, stop), chunk
                )
        whole = _whole(master.numel())
        rest = parts.cut(whole, master.numel())
        self._eager.split(master[whole:], weight[whole:], rest, scratch)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        for start, stop in _chunks(master.numel(), self._chunk):
            with scratch.passing():
                chunk = _Temporaries(stop - start, scratch)
                self._join_chunk(
                    weight[start:stop], parts.cut(start, stop), master[start:stop], chunk
                )
        whole = _whole(master.numel())
        rest = parts.cut(whole, master.numel())
        self._eager.join(weight[whole:], rest, master[whole:], scratch)

    def _split_chunk(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, chunk: _Temporaries
    ) -> None:
        bits = master.view(torch.int32)
        self._split(bits, chunk.high, None if parts.bitmap is None else chunk.marks)
        weight.view(torch.int16).copy_(chunk.high)
        parts.residual.copy_(bits)  # keeps the low half, on the devices that this is for
        if parts.bitmap is not None:
            chunk.bytes.copy_(chunk.marks)
            self._pack(chunk.bytes.view(torch.int64), parts.bitmap)
        self._fingerprint(chunk.high, self._weighted, self._plain, parts.fingerprints)

    def _join_chunk(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, chunk: _Temporaries
    ) -> None:
        chunk.high.copy_(weight.view(torch.int16))
        chunk.low.copy_(parts.residual)
        expected = parts.fingerprints.unsqueeze(1)
        self._same(chunk.high, self._weighted, self._plain, expected, chunk.same)
        marks = None
        if parts.bitmap is not None:
            self._unpack(parts.bitmap, chunk.bytes.view(torch.int64))
            marks = chunk.marks.copy_(chunk.bytes).view(-1, BLOCK)
        bits = master.view(torch.int32)
        high, low, out = (tensor.view(-1, BLOCK) for tensor in (chunk.high, chunk.low, bits))
        self._join(high, low, marks, chunk.same, out)


def _whole(numel: int) -> int:
    """How many elements are compiled."""
    return numel // BLOCK * BLOCK if numel >= 2 * BLOCK else 0


def _chunks(numel: int, size: int) -> list[tuple[int, int]]:
    """Where the chunks begin and end. None is of one block: that would be compiled for itself."""
    whole = _whole(numel)
    starts = [*range(0, whole, size), whole]
    if len(starts) > 2 and whole - starts[-2] == BLOCK:
        starts[-2] -= BLOCK
    return list(pairwise(starts))


def _split(bits: torch.Tensor, high: torch.Tensor, marks: torch.Tensor | None) -> None:
    magnitude, low, top = bits & 0x7FFFFFFF, bits & 0xFFFF, bits >> 16
    nan = magnitude > 0x7F800000
    if marks is None:
        up = low >= 0x8000
    else:
        tie = ((bits & 0x1FFFF) == 0x18000) & ~nan
        up = (low > 0x8000) | tie
        marks.copy_((tie | (nan & (magnitude < 0x7FC00000))).to(torch.int32))
    high.copy_(torch.where(nan, top | 0x40, top + up.to(torch.int32)))


def _pack(eights: torch.Tensor, bitmap: torch.Tensor) -> None:
    bitmap.copy_((eights * GATHER >> 56) & 0xFF)


def _unpack(bitmap: torch.Tensor, eights: torch.Tensor) -> None:
    eights.copy_((bitmap.to(torch.int64) * COPIES) & DIAGONAL)


def _fingerprint(
    high: torch.Tensor, weighted: torch.Tensor, plain: torch.Tensor, out: torch.Tensor
) -> None:
    out.copy_(_fingerprints(high, weighted, plain))


def _same(
    high: torch.Tensor,
    weighted: torch.Tensor,
    plain: torch.Tensor,
    expected: torch.Tensor,
    out: torch.Tensor,
) -> None:
    out.copy_((_fingerprints(high, weighted, plain).unsqueeze(1) == expected).to(torch.int32))


def _fingerprints(high: torch.Tensor, weighted: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    blocks = high.view(-1, SIDE, SIDE)
    rows = torch.arange(SIDE, 0, -1, dtype=torch.int32, device=high.device).unsqueeze(1)
    sums = blocks.sum(1, dtype=torch.int32).to(torch.int64)
    of_rows = (blocks * rows).sum(1, dtype=torch.int32).to(torch.int64)
    return (of_rows * weighted + sums * plain).sum(1)


def _join(
    high: torch.Tensor,
    residual: torch.Tensor,
    marks: torch.Tensor | None,
    same: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    low = residual * same
    nan = (high & 0x7FFF) > 0x7F80
    more = nan & (low < 0)
    if marks is None:
        bits.copy_(((high + more.to(torch.int32)) << 16) + low)
        return
    exception = marks * same != 0
    more = more | ((low == -0x8000) & ~exception)
    signalling = (nan & exception).to(torch.int32) << 22
    bits.copy_(((high + more.to(torch.int32)) << 16) + low - signalling)
