"""The fingerprint of a block of BF16 bits: what its weights are multiplied with.

A block is a matrix of 64 x 64 integers of 16 bits, padded with zeros:

    F = sum_r ROWS[r] * (sum_c STEPS[c] * x[r, c])  +  sum_c COLUMNS[c] * (sum_r x[r, c])

with 64 bits that wrap. The inner sums fit 32 bits, so that nothing there wraps or saturates, and
only 128 numbers per block are ever of 64 bits.

* A change of one element by d changes F by d * (ROWS[r] * STEPS[c] + COLUMNS[c]). That factor is
  odd, and d is no multiple of 2 ** 64: no change of a single element goes unnoticed.
* Any other change goes unnoticed by chance, of 2 ** -64 where it does not know the tables. Row and
  column sums alone would be blind to what leaves both as they are, such as the negation of a
  chequered pattern: `STEPS` sees that.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["COLUMNS", "ROWS", "SIDE", "STEPS"]

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


def _distinct(numbers: Iterator[int]) -> tuple[int, ...]:
    """64 different odd numbers below 512: 64 products with 16 bits still fit 31 bits."""
    chosen: dict[int, None] = {}
    while len(chosen) < SIDE:
        chosen[next(numbers) % 512 | 1] = None
    return tuple(chosen)


_NUMBERS = _splitmix64(_SEED)
STEPS = _distinct(_NUMBERS)
ROWS = tuple(next(_NUMBERS) >> 1 | 1 for _ in range(SIDE))  # odd, 63 bits
COLUMNS = tuple(next(_NUMBERS) >> 1 & ~1 for _ in range(SIDE))  # even, 63 bits
