"""The codec in torch's own operators: on every device, and what the others are held to.

[Note: no NaN] Half of the operators are there for NaNs, which a healthy training has none of. Where
the host reads a number without waiting, on a CPU, it looks at the sum of a chunk: where that is
finite, no element is NaN (nor infinite), and the shorter way gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ascend_core.optim.arena import Arena, aligned
from ascend_reuse_param._bits import BLOCK, Parts, Rounding, blocks_of
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED

__all__ = ["COPIES", "DIAGONAL", "GATHER", "EagerCodec"]

# Elements at a time. On a CPU the temporaries of so many (24 bytes each) stay in a core's cache;
# elsewhere they are worth the launches of some forty operators.
_CHUNK_IN_CACHE = 1 << 16
_CHUNK = 1 << 21

# 8 bytes of 0 or 1 in a word, times this, have their 8 bits side by side in the highest byte: the
# product's terms meet nowhere. And a byte, copied 8 times and masked, has bit k alone in byte k.
GATHER = 0x0102040810204080
COPIES = 0x0101010101010101
DIAGONAL = 0x8040201008040201 - (1 << 64)


class _Temporaries:
    """What one chunk needs, cut from an arena.

    What is true or false is an integer, 1 or 0: a comparison that writes bool is four times as
    slow on a CPU as one that writes what it reads.

    Attributes:
        high: int32 [p], where p is the number of elements in whole blocks.
        low: int32 [p].
        nan: int32 [p].
        mark: int32 [p].
        exception: int32 [p].
        bytes: uint8 [p].
        words: int64 [p / 8].
        sums: int32 [blocks, 128], weighted before plain.
        wide: int64 [blocks, 128].
        found: int64 [blocks], fingerprints.
        same: int32 [blocks], 1 where a fingerprint is right.
    """

    def __init__(self, numel: int, scratch: Arena) -> None:
        blocks = blocks_of(numel)
        padded = blocks * BLOCK
        self.high = scratch.take(padded, torch.int32)
        self.low = scratch.take(padded, torch.int32)
        self.nan = scratch.take(padded, torch.int32)
        self.mark = scratch.take(padded, torch.int32)
        self.exception = scratch.take(padded, torch.int32)
        self.bytes = scratch.take(padded, torch.uint8)
        self.words = scratch.take(padded // 8, torch.int64)
        self.sums = scratch.take(blocks * 2 * SIDE, torch.int32).view(blocks, 2 * SIDE)
        self.wide = scratch.take(blocks * 2 * SIDE, torch.int64).view(blocks, 2 * SIDE)
        self.found = scratch.take(blocks, torch.int64)
        self.same = scratch.take(blocks, torch.int32)

    @staticmethod
    def nbytes(numel: int) -> int:
        """What an instance for so many elements cuts."""
        blocks = blocks_of(numel)
        padded = blocks * BLOCK
        sums = aligned(blocks * 2 * SIDE * 4) + aligned(blocks * 2 * SIDE * 8)
        small = 2 * aligned(blocks * 8)
        return 5 * aligned(padded * 4) + 2 * aligned(padded) + sums + small


class EagerCodec:
    """Splits and joins in torch operators that write into an arena.

    No operator reads a size from the device, and no integer of 32 bits overflows, so that devices
    whose arithmetic saturates agree. The few of 64 bits wrap.

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
        chunk: int | None = None,
    ) -> None:
        self.rounding: Rounding = rounding
        self._chunk = chunk or (_CHUNK_IN_CACHE if device.type == "cpu" else _CHUNK)
        assert self._chunk % BLOCK == 0
        # In C++ a cast to fewer bits drops the others; on other devices it may saturate.
        self._casts_truncate = device.type in ("cpu", "cuda")
        self._looks = device.type == "cpu"
        rows = torch.arange(SIDE, 0, -1, dtype=torch.int32, device=device)
        self._rows = rows.unsqueeze(1)
        self._factors = torch.tensor(WEIGHTED + PLAIN, dtype=torch.int64, device=device)

    def scratch_bytes(self, numel: int) -> int:
        """How much of an arena `split` or `join` takes; all of it is given back."""
        return _Temporaries.nbytes(min(numel, self._chunk))

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        with scratch.passing():
            for start, stop, temporaries in self._chunks(master.numel(), scratch):
                chunk = parts.cut(start, stop)
                self._split(master[start:stop], weight[start:stop], chunk, temporaries)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        with scratch.passing():
            for start, stop, temporaries in self._chunks(master.numel(), scratch):
                chunk = parts.cut(start, stop)
                self._join(weight[start:stop], chunk, master[start:stop], temporaries)

    def _chunks(self, numel: int, scratch: Arena) -> Iterator[tuple[int, int, _Temporaries]]:
        """Yield where each chunk starts and stops, and its temporaries."""
        mark, last = scratch.mark, 0
        for start in range(0, numel, self._chunk):
            size = min(self._chunk, numel - start)
            if size != last:  # only the last one may be shorter
                scratch.rewind(mark)
                temporaries, last = _Temporaries(size, scratch), size
            yield start, start + size, temporaries

    def _split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, temporaries: _Temporaries
    ) -> None:
        if parts.bitmap is not None and self._has_no_nan(master):
            self._split_numbers(master, weight, parts, temporaries)
            return
        numel = master.numel()
        high, up, nan = (t[:numel] for t in (temporaries.high, temporaries.low, temporaries.nan))
        bits = master.view(torch.int32)
        halves = bits if self._casts_truncate else master.view(torch.int16)[::2]
        parts.residual.copy_(halves)
        torch.bitwise_and(bits, 0x7FFFFFFF, out=up)
        torch.gt(up, 0x7F800000, out=nan)
        if parts.bitmap is None:
            torch.bitwise_right_shift(bits, 15, out=up)
            up.bitwise_and_(1)
        else:
            exception, tie = temporaries.exception[:numel], temporaries.mark[:numel]
            torch.lt(up, 0x7FC00000, out=exception)
            exception.mul_(nan)
            torch.bitwise_and(bits, 0x1FFFF, out=up)
            torch.eq(up, 0x18000, out=tie)  # half-way above an odd high half
            up.bitwise_and_(0xFFFF)
            torch.gt(up, 0x8000, out=up)
            up.add_(tie)
            torch.gt(tie, nan, out=tie)
            exception.add_(tie)
            self._pack(temporaries, numel, parts.bitmap)
        torch.gt(up, nan, out=up)
        torch.bitwise_right_shift(bits, 16, out=high)
        high.add_(up)  # within 16 bits: what would go beyond is a NaN
        nan.bitwise_left_shift_(6)
        high.bitwise_or_(nan)
        weight.view(torch.int16).copy_(high)
        self._fingerprint(temporaries, numel, parts.fingerprints)

    def _split_numbers(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, temporaries: _Temporaries
    ) -> None:
        """Split what has no NaN: there, torch's cast is the weight."""
        assert parts.bitmap is not None
        numel = master.numel()
        exception, bits = temporaries.exception[:numel], master.view(torch.int32)
        parts.residual.copy_(bits)
        torch.bitwise_and(bits, 0x1FFFF, out=exception)
        exception.eq_(0x18000)  # half-way above an odd high half
        self._pack(temporaries, numel, parts.bitmap)
        weight.copy_(master)
        temporaries.high[:numel].copy_(weight.view(torch.int16))
        self._fingerprint(temporaries, numel, parts.fingerprints)

    def _join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, temporaries: _Temporaries
    ) -> None:
        self._load(weight, parts, temporaries)
        if self._looks:
            self._join_numbers(parts, master, temporaries)
            if self._has_no_nan(master):  # what is joined from a NaN is one
                return
            self._load(weight, parts, temporaries)
        numel = master.numel()
        high, low, nan = (t[:numel] for t in (temporaries.high, temporaries.low, temporaries.nan))
        more, bits = temporaries.mark[:numel], master.view(torch.int32)
        torch.bitwise_and(high, 0x7FFF, out=nan)
        torch.gt(nan, 0x7F80, out=nan)
        # A residual is signed here: below the high half, a negative one takes 1 from it. That is
        # wrong, and undone by 1 more, for a NaN and for a tie that was rounded down.
        torch.lt(low, 0, out=more)
        more.mul_(nan)
        if parts.bitmap is not None:
            exception, tie = temporaries.exception[:numel], bits  # a place to compute in
            torch.eq(low, -0x8000, out=tie)
            torch.gt(tie, exception, out=tie)
            more.bitwise_or_(tie)
            nan.mul_(exception)
        high.add_(more)
        high.bitwise_left_shift_(16)
        torch.add(high, low, out=bits)
        if parts.bitmap is not None:
            bits.sub_(nan, alpha=0x400000)

    def _load(self, weight: torch.Tensor, parts: Parts, temporaries: _Temporaries) -> None:
        """Fill `high`; `low` and `exception` too, but for blocks that somebody else wrote."""
        numel = weight.numel()
        temporaries.high[:numel].copy_(weight.view(torch.int16))
        self._fingerprint(temporaries, numel, temporaries.found)
        self._compare(temporaries, parts.fingerprints)
        temporaries.low[:numel].copy_(parts.residual)
        temporaries.low.view(-1, BLOCK).mul_(temporaries.same.unsqueeze(1))
        if parts.bitmap is not None:
            self._unpack(temporaries, parts.bitmap)

    def _join_numbers(self, parts: Parts, master: torch.Tensor, temporaries: _Temporaries) -> None:
        """Join what has no NaN."""
        numel = master.numel()
        high, low = temporaries.high[:numel], temporaries.low[:numel]
        if parts.bitmap is not None:
            tie = temporaries.mark[:numel]
            torch.eq(low, -0x8000, out=tie)
            tie.gt_(
                temporaries.exception[:numel]
            )  # rounded down: a negative residual takes nothing
            high.add_(tie)
        high.bitwise_left_shift_(16)
        torch.add(high, low, out=master.view(torch.int32))

    def _has_no_nan(self, master: torch.Tensor) -> bool:
        """Whether it is known that there is none."""
        return self._looks and math.isfinite(master.sum().item())

    def _fingerprint(self, temporaries: _Temporaries, numel: int, out: torch.Tensor) -> None:
        """Fingerprint what is in `high`; `low` is overwritten."""
        high, low, sums, wide = (
            temporaries.high,
            temporaries.low.view(-1, SIDE, SIDE),
            temporaries.sums,
            temporaries.wide,
        )
        high[numel:].zero_()
        blocks = high.view(-1, SIDE, SIDE)
        torch.mul(blocks, self._rows, out=low)
        # Torch would first copy the whole to 64 bits if it had to sum in 64.
        torch.sum(low, 1, dtype=torch.int32, out=sums[:, :SIDE])
        torch.sum(blocks, 1, dtype=torch.int32, out=sums[:, SIDE:])
        wide.copy_(sums)
        wide.mul_(self._factors)
        torch.sum(wide, 1, out=out)

    def _compare(self, temporaries: _Temporaries, expected: torch.Tensor) -> None:
        """Set `same` from `found`."""
        torch.eq(temporaries.found, expected, out=temporaries.same)

    def _pack(self, temporaries: _Temporaries, numel: int, bitmap: torch.Tensor) -> None:
        """Write the exceptions as a bitmap."""
        words = temporaries.words
        temporaries.bytes[:numel].copy_(temporaries.exception[:numel])
        temporaries.bytes[numel:].zero_()
        eights = temporaries.bytes.view(torch.int64)
        torch.mul(eights, GATHER, out=words)
        words.bitwise_right_shift_(56).bitwise_and_(0xFF)  # the shift is an arithmetic one
        bitmap.copy_(words[: bitmap.numel()])

    def _unpack(self, temporaries: _Temporaries, bitmap: torch.Tensor) -> None:
        """Write the exceptions of blocks whose weights are the same, from a bitmap."""
        words = temporaries.words
        words[: bitmap.numel()].copy_(bitmap)
        words[bitmap.numel() :].zero_()
        words.view(-1, BLOCK // 8).mul_(temporaries.same.unsqueeze(1))
        words.mul_(COPIES).bitwise_and_(DIAGONAL)
        temporaries.exception.copy_(words.view(torch.uint8))
        torch.gt(temporaries.exception, 0, out=temporaries.exception)
