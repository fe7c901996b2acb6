"""Who owns which elements."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ascend_ddp._plan import GRID, Size, plan_buckets
from ascend_ddp._shards import pieces_of

NUMELS = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(numels=NUMELS, ranks=st.integers(1, 9), bucket_bytes=st.sampled_from([1, 3000, 1 << 20]))
def test_each_element_is_owned_once(numels: list[int], ranks: int, bucket_bytes: int) -> None:
    sizes = {i: Size(str(i), n, 4, ("float32", "cpu")) for i, n in enumerate(numels)}
    plans = plan_buckets(sizes, [], bucket_bytes, ranks)
    owned: dict[int, list[tuple[int, int]]] = {}
    for rank in range(ranks):
        pieces = pieces_of(plans, rank, ranks)
        for piece in pieces:
            size = plans[piece.bucket].numel // ranks
            assert 0 <= piece.begin <= piece.end <= size
            owned.setdefault(piece.parameter, []).append((piece.start, piece.stop))
            slot = next(s for s in plans[piece.bucket].slots if s.parameter == piece.parameter)
            assert piece.numel == 0 or rank * size + piece.begin == slot.begin + piece.start
        for one, other in itertools.pairwise(piece for piece in pieces if piece.numel):
            assert one.bucket < other.bucket or one.end <= other.begin
    for parameter, numel in enumerate(numels):
        ranges = sorted(owned[parameter])
        assert ranges[0][0] == 0 and ranges[-1][1] == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert numel > 0 or len(ranges) == 1


@given(numels=NUMELS, ranks=st.integers(1, 9))
def test_a_piece_is_cut_on_the_grid_of_its_parameter(numels: list[int], ranks: int) -> None:
    """Where it begins, and where it ends before its parameter does."""
    sizes = {i: Size(str(i), n, 4, ("float32", "cpu")) for i, n in enumerate(numels)}
    plans = plan_buckets(sizes, [], 1 << 20, ranks)
    for rank in range(ranks):
        for piece in pieces_of(plans, rank, ranks):
            assert piece.start % GRID == 0 and piece.begin % GRID == 0
            assert piece.stop % GRID == 0 or piece.stop == numels[piece.parameter]
