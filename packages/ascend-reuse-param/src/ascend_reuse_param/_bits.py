"""What a split leaves: the FP32 master as a BF16 weight and what is kept beside it.

    u         the 32 bits of an element of the master
    weight    BF16: u rounded to the nearest, ties to even, as torch casts; NaN: (u >> 16) | 0x40
    residual  the low 16 bits of u
    exception one bit: a tie that was rounded up, or a NaN whose quiet bit was clear

    join      hi = the bits of weight
              NaN                                           hi, less 0x40 with an exception
              residual > 0x8000, or = 0x8000 and exception  hi - 1
              else                                          hi
              ... above the residual

[Note: why an exception] Under round-to-nearest-even an even BF16 value is the image of 65537 FP32
values, and an odd one of 65535: both ties beside it go to the even one. 16 bits of residual cannot
tell 65537 values apart, so that one bit more is needed where the residual is 0x8000.

`"half-away"` rounds ties away from zero instead, as MindSpeed does: each BF16 value has 65536
preimages, and there is no exception. It differs from torch's cast where a tie meets an even value
(7e-6 of random values). All but NaNs whose quiet bit is clear (signalling ones) are restored; those
come back with it set.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import torch

from ascend_core.optim.arena import Arena

__all__ = ["BLOCK", "Codec", "Parts", "Rounding", "blocks_of", "compact", "expand"]

BLOCK = 4096  # elements that one fingerprint covers
Rounding = Literal["nearest-even", "half-away"]


def blocks_of(numel: int) -> int:
    """How many blocks some elements have; the last may be short."""
    return -(-numel // BLOCK)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is kept beside `n` BF16 weights, on their device.

    Attributes:
        residual: int16 [n], the low halves of the master.
        bitmap: uint8 [ceil(n / 8)], the exceptions: element i is bit i % 8 of byte i // 8. The
            spare bits are 0. None with the rounding `"half-away"`, which has none.
        fingerprints: int64 [blocks_of(n)], of the weight's bits, made at split.
    """

    residual: torch.Tensor
    bitmap: torch.Tensor | None
    fingerprints: torch.Tensor

    @classmethod
    def empty(cls, numel: int, device: torch.device, rounding: Rounding = "nearest-even") -> Parts:
        """Allocate parts of undefined content."""
        exact = rounding == "nearest-even"
        size = -(-numel // 8)
        return cls(
            residual=torch.empty(numel, dtype=torch.int16, device=device),
            bitmap=torch.empty(size, dtype=torch.uint8, device=device) if exact else None,
            fingerprints=torch.empty(blocks_of(numel), dtype=torch.int64, device=device),
        )

    def cut(self, start: int, stop: int) -> Parts:
        """The parts of some elements; they start at the start of a block."""
        bitmap = self.bitmap
        return Parts(
            residual=self.residual[start:stop],
            bitmap=None if bitmap is None else bitmap[start // 8 : -(-stop // 8)],
            fingerprints=self.fingerprints[start // BLOCK : blocks_of(stop)],
        )


class Codec(Protocol):
    """One way to compute splits and joins; all of them agree in every bit.

    Tensors are one-dimensional and contiguous, of n elements and on one device. The weight and the
    residual may lie at any even address.

    Attributes:
        rounding: What it rounds by; parts have a bitmap with `"nearest-even"` only.
    """

    rounding: Rounding

    def scratch_bytes(self, numel: int) -> int:
        """How much of an arena `split` or `join` takes; all of it is given back."""
        ...

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """Write the weight, BF16, and the parts of an FP32 master.

        The host reads nothing, and waits for nothing.
        """
        ...

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """Write the master that a weight and its parts stand for.

        In a block whose weights are not those of its fingerprint, somebody else wrote them: there
        the master is the weight as it is, and residual and exceptions count as 0. The host reads
        nothing, and waits for nothing.
        """
        ...


def compact(words: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List the words of a bitmap that are not 0.

    The host reads nothing. The list has the length that it is given: where there are fewer such
    words, its end is padded with the index `len(words)` and 0; what is beyond it is not listed.

    Args:
        words: int32 [k], a bitmap.
        count: How many to list.

    Returns:
        Their indices, int32 [count], ascending, and the words, int32 [count].
    """
    # The n-th such word is where their running number reaches n.
    numbers = words.ne(0).cumsum(0, dtype=torch.int32)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=words.device)
    index = torch.searchsorted(numbers, wanted, out_int32=True)
    value = torch.cat([words, words.new_zeros(1)]).index_select(0, index)
    return index, value


def expand(index: torch.Tensor, value: torch.Tensor, words: torch.Tensor) -> None:
    """Write the bitmap that a list of words came from.

    Args:
        index: int32 [count], from `compact`.
        value: int32 [count], from `compact`.
        words: int32 [k]. Overwritten.
    """
    words.zero_()
    if words.numel():
        # Padding adds 0 to the last word; every other index is there once.
        words.index_add_(0, index.clamp(max=words.numel() - 1), value)
