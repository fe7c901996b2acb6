"""Which pieces of which parameters a rank owns: pure arithmetic, without torch.

A bucket is cut into as many parts as there are ranks. A slot begins on the grid of 64 elements, and
so does a part; where a part ends within a parameter, it ends on that parameter's grid too. So a
fused optimizer rounds the elements of a piece as it rounds those of the whole parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ascend_ddp._plan import BucketPlan

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """What a rank owns of one parameter: at most one range of its elements, in memory order.

    Attributes:
        parameter: Its index.
        bucket: The number of its bucket.
        start: The first of its elements; a multiple of GRID.
        stop: One past the last.
        begin: Where the piece begins in the rank's part of the bucket, in elements.
    """

    parameter: int
    bucket: int
    start: int
    stop: int
    begin: int

    @property
    def numel(self) -> int:
        """How many elements it has; 0 only where the parameter is empty."""
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Where it ends in the rank's part of the bucket."""
        return self.begin + self.numel


def pieces_of(plans: Sequence[BucketPlan], rank: int, ranks: int) -> list[Piece]:
    """What a rank owns.

    Args:
        plans: The buckets.
        rank: Which rank.
        ranks: How many there are.

    Returns:
        The pieces, bucket by bucket. Those of all ranks hold each element once, and an empty
        parameter is owned by one rank.
    """
    found = []
    for number, plan in enumerate(plans):
        size = plan.numel // ranks
        first, last = rank * size, (rank + 1) * size
        for index, begin, numel in plan.slots:
            start, stop = max(begin, first), min(begin + numel, last)
            owns = start < stop
            if numel == 0:
                start = stop = begin
                owns = rank == (min(begin // size, ranks - 1) if size else 0)
            if owns:
                inside = start - first if numel else 0
                found.append(Piece(index, number, start - begin, stop - begin, inside))
    return found
