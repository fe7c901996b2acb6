"""How parameters are cut into windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_core.optim.windows import GRID, cut_windows, elements_per_window

NUMELS = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


def test_a_parameter_larger_than_a_window_is_cut_on_the_grid() -> None:
    (first,), (second,), (third,) = cut_windows([300], 130)
    assert [(s.start, s.stop) for s in (first, second, third)] == [(0, 128), (128, 256), (256, 300)]
    assert [s.number for s in (first, second, third)] == [0, 1, 2]
    assert [s.is_last for s in (first, second, third)] == [False, False, True]


def test_small_parameters_share_a_window() -> None:
    (window,) = cut_windows([1, 7, 0, 50], 64)
    assert [s.parameter for s in window] == [0, 1, 2, 3]


@given(NUMELS, st.integers(GRID, 3000))
def test_every_element_is_in_one_slice_and_slices_begin_on_the_grid(
    numels: list[int], elements: int
) -> None:
    windows = cut_windows(numels, elements)
    assert all(windows)
    assert all(sum(s.numel for s in window) <= elements for window in windows)
    slices = [s for window in windows for s in window]
    assert all(s.start % GRID == 0 for s in slices)
    for parameter, numel in enumerate(numels):
        mine = [s for s in slices if s.parameter == parameter]
        assert [s.number for s in mine] == list(range(len(mine)))
        assert [s.start for s in mine] == [0, *(s.stop for s in mine[:-1])]
        assert mine[-1].stop == numel
        assert [s.is_last for s in mine] == [False] * (len(mine) - 1) + [True]


@given(NUMELS, st.integers(1, 70))
def test_there_are_at_most_as_many_windows_as_asked_for(numels: list[int], times: int) -> None:
    elements = elements_per_window(numels, times)
    assert len(cut_windows(numels, elements)) <= times
    assert elements <= max(GRID, sum(numels) / times + 2 * GRID)


@pytest.mark.parametrize("times", [1, 3, 16])
def test_equal_parameters_make_equal_windows(times: int) -> None:
    windows = cut_windows([640] * times, elements_per_window([640] * times, times))
    assert [sum(s.numel for s in w) for w in windows] == [640] * times
