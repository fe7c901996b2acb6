"""The codec as `torch.compile` makes it: the same integers in a few fused loops.

[Note: two elements in a word] A loop that loads or stores an integer of 16 bits, that compares, or
that looks at a float's bits is not vectorized on a CPU and takes up to ten times as long; integers
of 32 and of 64 bits are. So two elements of 16 bits are read as one integer of 32, spread to the
low halves of the two halves of one of 64, and worked on together there. No sum crosses from one
into the other: each has 32 bits of its own, and none is larger. What would be a comparison is the
carry of a sum. The earlier element is the lower one: this is for processors that are
little-endian, as all are that torch compiles for.

[Note: whole blocks alone] What is compiled is compiled again for each new relation between sizes
(one element, a multiple of 8, a multiple of a block), and given up after a few. So it gets whole
blocks, two at least, which all have the same relations; the rest goes to torch's operators.

[Note: apart] Where what is compiled writes to an argument that shares its storage with another one,
as all that an arena cuts does, it works on copies, or cannot be compiled at all. So each argument
is made a tensor with a storage of its own over the same memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.dlpack import from_dlpack

from ascend_core.optim.arena import Arena, aligned
from ascend_reuse_param._bits import BLOCK, Parts, Rounding
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED
from ascend_reuse_param._kernels.eager import EagerCodec

__all__ = ["CompiledCodec"]

_CHUNK = 1 << 21  # elements: calling what is compiled takes as long as some 100 000 of them
_CHUNK_OF_REST = 1 << 16  # what is shorter than a block, or not aligned: it is worth little memory

# Of both elements of a word: the lowest bit, the low half, and what is added so that bit 16 says
# more than 0x8000, bit 15 of an upper half NaN, bit 31 NaN, and bit 17 not 0.
_ONES = 0x0000_0001_0000_0001
_LOW = 0xFFFF * _ONES
_ABOVE_HALF = 0x7FFF * _ONES
_UPPER_NAN = 0x007F * _ONES
_NAN = 0x007F_FFFF * _ONES
_NOT_ZERO = 0x1_FFFF * _ONES

# Whatever the number of its operators, a loop stays one, and what is in between in registers.
_OPTIONS = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 16}

_LANES = 16  # words of 64 bits that one word of 32 bits of a bitmap is about


class _Temporaries:
    """What a chunk of whole blocks needs, cut from an arena.

    Attributes:
        marks: int32 [n / 2], the exceptions of two elements.
        bytes: uint8 [n / 2], the same.
        sixteens: int32 [n / 16], those of 16 elements.
        words: int32 [n / 32], those of 32: the bitmap.
        same: int64 [n / BLOCK], -1 where a fingerprint is right, else 0.
    """

    def __init__(self, numel: int, scratch: Arena) -> None:
        self.marks = _apart(scratch.take(numel // 2, torch.int32))
        self.bytes = scratch.take(numel // 2, torch.uint8)
        self.sixteens = _apart(scratch.take(numel // 16, torch.int32))
        self.words = _apart(scratch.take(numel // 32, torch.int32))
        self.same = _apart(scratch.take(numel // BLOCK, torch.int64))

    @staticmethod
    def nbytes(numel: int) -> int:
        """What an instance for so many elements cuts."""
        own = (2 * numel, numel // 2, numel // 4, numel // 8, numel // BLOCK * 8)
        return sum(map(aligned, own))


class CompiledCodec:
    """Splits and joins in loops that `torch.compile` generates at the first call.

    A weight whose address is no multiple of 4 goes through torch's operators.

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
        rows = (WEIGHTED[0::2], WEIGHTED[1::2], PLAIN[0::2], PLAIN[1::2])
        self._tables = torch.tensor(rows, dtype=torch.int64, device=device)
        loops = (_split, _finish, _join)
        compiled = (
            torch.compile(loop, dynamic=True, fullgraph=True, options={**_OPTIONS})
            for loop in loops
        )
        self._split, self._finish, self._join = compiled
        self._eager = EagerCodec(device, rounding, chunk=_CHUNK_OF_REST)

    def scratch_bytes(self, numel: int) -> int:
        """How much of an arena `split` or `join` takes; all of it is given back."""
        largest = max((stop - start for start, stop in _chunks(numel, self._chunk)), default=0)
        return max(_Temporaries.nbytes(largest), self._eager.scratch_bytes(numel))

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        whole = _whole(master, weight, parts.residual)
        for start, stop in _chunks(whole, self._chunk):
            with scratch.passing():
                chunk = parts.cut(start, stop)
                self._split_chunk(master[start:stop], weight[start:stop], chunk, scratch)
        if whole < master.numel():
            rest = parts.cut(whole, master.numel())
            self._eager.split(master[whole:], weight[whole:], rest, scratch)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        whole = _whole(master, weight, parts.residual)
        for start, stop in _chunks(whole, self._chunk):
            with scratch.passing():
                chunk = parts.cut(start, stop)
                self._join_chunk(weight[start:stop], chunk, master[start:stop], scratch)
        if whole < master.numel():
            rest = parts.cut(whole, master.numel())
            self._eager.join(weight[whole:], rest, master[whole:], scratch)

    def _split_chunk(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        bits = _apart(master.view(torch.int64))
        high, low = (_apart(half.view(torch.int32)) for half in (weight, parts.residual))
        fingerprints = _apart(parts.fingerprints)
        if parts.bitmap is None:
            self._split(bits, high, low, None)
            self._finish(high, self._tables, fingerprints, None, None)
            return
        chunk = _Temporaries(master.numel(), scratch)
        self._split(bits, high, low, chunk.marks)
        eights = _apart(chunk.bytes.copy_(chunk.marks).view(torch.int64))
        self._finish(high, self._tables, fingerprints, eights, chunk.sixteens)
        chunk.words.view(torch.int16).copy_(chunk.sixteens)
        parts.bitmap.copy_(chunk.words.view(torch.uint8))

    def _join_chunk(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        chunk = _Temporaries(master.numel(), scratch)
        words = None
        if parts.bitmap is not None:
            words = chunk.words
            words.view(torch.uint8).copy_(parts.bitmap)
        high, low = (_apart(half.view(torch.int32)) for half in (weight, parts.residual))
        # Of the shape that it is written in: otherwise it would be written elsewhere first.
        bits = _apart(master.view(torch.int64)).view(-1, BLOCK // 32, _LANES)
        fingerprints = _apart(parts.fingerprints)
        self._join(high, low, words, self._tables, fingerprints, chunk.same, bits)


def _whole(master: torch.Tensor, *halves: torch.Tensor) -> int:
    """How many elements are compiled: whole blocks of what can be read two at a time."""
    numel = master.numel()
    if numel < 2 * BLOCK or not all(map(_is_aligned, (master, *halves))):
        return 0
    return numel // BLOCK * BLOCK


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether it can be viewed as words of twice the size."""
    return tensor.storage_offset() % 2 == 0 and tensor.data_ptr() % (2 * tensor.itemsize) == 0


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own."""
    apart: torch.Tensor = from_dlpack(tensor)
    return apart


def _chunks(numel: int, size: int) -> list[tuple[int, int]]:
    """Where the chunks begin and end. None is of one block: that would be compiled for itself."""
    whole = numel // BLOCK * BLOCK if numel >= 2 * BLOCK else 0
    starts = [*range(0, whole, size), whole]
    if len(starts) > 2 and whole - starts[-2] == BLOCK:
        starts[-2] -= BLOCK
    return list(pairwise(starts))


def _spread(pairs: torch.Tensor) -> torch.Tensor:
    """Two elements of 16 bits to the low halves of the halves of 64."""
    words = pairs.to(torch.int64) & 0xFFFF_FFFF
    return (words | (words << 16)) & _LOW


def _gathered(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_spread`."""
    return (words | (words >> 16)).to(torch.int32)


def _split(
    bits: torch.Tensor, high: torch.Tensor, residual: torch.Tensor, marks: torch.Tensor | None
) -> None:
    low, top = bits & _LOW, (bits >> 16) & _LOW
    nan = (((bits & 0x7FFF_FFFF * _ONES) + _NAN) >> 31) & _ONES
    if marks is None:
        up = (low >> 15) & _ONES
    else:
        up = ((low + (top & _ONES) + _ABOVE_HALF) >> 16) & _ONES
        from_tie = (bits & _NOT_ZERO) ^ 0x1_8000 * _ONES  # 0 for a tie above an odd upper half
        tie = ~((from_tie + _NOT_ZERO) >> 17) & _ONES
        signalling = ~(bits >> 22) & _ONES
        exception = tie ^ ((tie ^ signalling) & nan)
        marks.copy_((exception | (exception >> 31)).to(torch.int32) & 3)
    high.copy_(_gathered((top + (up & ~nan)) | (nan << 6)))
    residual.copy_(_gathered(low))


def _finish(
    high: torch.Tensor,
    tables: torch.Tensor,
    fingerprints: torch.Tensor,
    eights: torch.Tensor | None,
    sixteens: torch.Tensor | None,
) -> None:
    """Fingerprint, and put the exceptions of 16 elements, two in each byte, side by side."""
    fingerprints.copy_(_fingerprints(high, tables))
    if eights is not None and sixteens is not None:
        fours = (eights | (eights >> 6)) & 0x000F_000F_000F_000F
        halves = (fours | (fours >> 12)) & 0x0000_00FF_0000_00FF
        sixteens.copy_((halves | (halves >> 24)).to(torch.int32) & 0xFFFF)


def _fingerprints(high: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    blocks = high.view(-1, SIDE, SIDE // 2)
    rows = torch.arange(SIDE, 0, -1, dtype=torch.int32, device=high.device).unsqueeze(1)
    even, odd = blocks << 16 >> 16, blocks >> 16
    sums = [column.sum(1, dtype=torch.int32) for column in (even * rows, odd * rows, even, odd)]
    products = [
        columns.to(torch.int64) * table for columns, table in zip(sums, tables, strict=True)
    ]
    return torch.sum(products[0] + products[1] + products[2] + products[3], 1)


def _join(
    high: torch.Tensor,
    residual: torch.Tensor,
    words: torch.Tensor | None,
    tables: torch.Tensor,
    fingerprints: torch.Tensor,
    same: torch.Tensor,
    bits: torch.Tensor,
) -> None:
    same.copy_(-(_fingerprints(high, tables) == fingerprints).to(torch.int64))
    shape = bits.shape
    right = same.view(-1, 1, 1)
    top = _spread(high.view(shape))
    low = _spread(residual.view(shape)) & right
    nan = (((top & 0x7FFF * _ONES) + _UPPER_NAN) >> 15) & _ONES
    if words is None:
        down = (low >> 15) & _ONES
    else:
        places = torch.arange(0, 32, 2, dtype=torch.int32, device=high.device)
        two = ((words.view(-1, BLOCK // 32, 1) >> places) & 3).to(torch.int64) & right
        exception = (two | (two << 31)) & _ONES
        down = ((low + exception + _ABOVE_HALF) >> 16) & _ONES
        top = top - ((exception & nan) << 6)
    bits.copy_(((top - (down & ~nan)) << 16) | low)
