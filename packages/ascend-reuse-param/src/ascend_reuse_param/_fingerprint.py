"""The fingerprint of a block of BF16 bits: what its weights are multiplied with.

A block is a matrix of 64 x 64 integers of 16 bits, padded with zeros:

    F = sum_c  WEIGHTED[c] * (sum_r (64 - r) * x[r, c])  +  PLAIN[c] * (sum_r x[r, c])

with 64 bits that wrap. The inner sums fit 27 bits, so that nothing there wraps or saturates, and
only 128 numbers per block are ever of 64 bits. They need no product either: the sum of the sums up
to each row is the weighted one.

* A change of one element by d changes F by d * (WEIGHTED[c] * (64 - r) + PLAIN[c]). That factor is
  odd, and d is no multiple of 2 ** 64: no change of a single element goes unnoticed.
* Any other change that leaves some column's sums as they are leaves no trace of that column; such
  needs three elements of it that move against one another. What changes some sum goes unnoticed by
  chance, of 2 ** -64 where it does not know the tables. Sums of rows and of columns alone would be
  blind to what leaves both as they are, such as the negation of a chequered pattern.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

__all__ = ["PLAIN", "SIDE", "WEIGHTED"]

SIDE = 64  # rows, and columns, of a block
_SEED = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _splitmix64(seed: int) -> Iterator[int]:
    """Steele, Lea and Flood's generator (OOPSLA 2014): its output is fixed for all time."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        yield mixed ^ (mixed >> 31)


_NUMBERS = [number >> 1 for number in itertools.islice(_splitmix64(_SEED), 2 * SIDE)]
WEIGHTED = tuple(number & ~1 for number in _NUMBERS[:SIDE])  # even, 63 bits
PLAIN = tuple(number | 1 for number in _NUMBERS[SIDE:])  # odd, 63 bits
