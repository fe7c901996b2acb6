"""The codec as `torch.compile` makes it: the same integers in a few fused loops.

[Note: two elements in a word] A loop that loads or stores an integer of 16 bits, that compares, or
that looks at a float's bits is not vectorized on a CPU and takes up to ten times as long; integers
of 32 and of 64 bits are. So two elements of 16 bits are read as one integer of 32, spread to the
low halves of the two halves of one of 64, and worked on together there. No sum crosses from one
into the other: each has 32 bits of its own, and none is larger. What would be a comparison is the
carry of a sum. The earlier element is the lower one: this is for processors that are
little-endian, as all are that torch compiles for. Bytes are stored by vectors too, but as int8
alone.

[Note: one nest] Loops that follow from one another, and whose outermost runs over blocks, become
one loop over blocks, with the others inside: so a join reads weights from memory for their
fingerprint, and from the first-level cache for the rest. One vector over blocks among them, and
each loop runs over everything by itself: nothing is written, or kept, by block in `_join`. What
`_split` makes would be computed twice there, so it has a call of its own.

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

# Elements at a time, a multiple of BLOCK. Each call takes as long as some 100 000 of them, and
# smaller chunks, that stay in a cache, do not make up for it; a split takes half a byte for each.
_CHUNK = 1 << 24
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
        marks = aligned(largest // 2)  # the words of a join are fewer
        return max(marks, self._eager.scratch_bytes(numel))

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
        marks = scratch.take(master.numel() // 2, torch.int8)
        self._split(bits, high, low, _apart(marks))
        fours, bitmap = _apart(marks.view(torch.int32)), _apart(parts.bitmap.view(torch.int8))
        self._finish(high, self._tables, fingerprints, fours, bitmap)

    def _join_chunk(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        words = None
        if parts.bitmap is not None:
            words = scratch.take(master.numel() // 32, torch.int32)
            words.view(torch.uint8).copy_(parts.bitmap)
            words = _apart(words)
        high, low = (_apart(half.view(torch.int32)) for half in (weight, parts.residual))
        # Of the shape that it is written in: otherwise it would be written elsewhere first.
        bits = _apart(master.view(torch.int64)).view(-1, BLOCK // 32, _LANES)
        fingerprints = _apart(parts.fingerprints)
        self._join(high, low, words, self._tables, fingerprints, bits)


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
    # By way of its capsule: handing over the tensor takes twice as long.
    apart: torch.Tensor = from_dlpack(tensor.__dlpack__())
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
    """Write both halves, and, if there are marks, the exceptions of two elements as 2 bits each."""
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
        two = (exception | (exception >> 31)).to(torch.int32) & 3
        marks.copy_(two.to(torch.int8))
    high.copy_(_gathered((top + (up & ~nan)) | (nan << 6)))
    residual.copy_(_gathered(low))


def _finish(
    high: torch.Tensor,
    tables: torch.Tensor,
    fingerprints: torch.Tensor,
    fours: torch.Tensor | None,
    bitmap: torch.Tensor | None,
) -> None:
    """Fingerprint, and put the exceptions of 8 elements, two in each byte, side by side in one."""
    fingerprints.copy_(_fingerprints(high, tables))
    if fours is not None and bitmap is not None:
        halves = (fours | (fours >> 6)) & 0x000F_000F
        bitmap.copy_((halves | (halves >> 12)).to(torch.int8))


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
    bits: torch.Tensor,
) -> None:
    shape = bits.shape
    right = -(_fingerprints(high, tables) == fingerprints).to(torch.int64).view(-1, 1, 1)
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
