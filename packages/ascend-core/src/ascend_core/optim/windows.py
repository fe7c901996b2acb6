"""How parameters are cut into windows. Pure: imports no torch.

[Note: where a slice may begin]
Torch's fused kernels take a tensor in SIMD blocks and round what is left over at its end with other
instructions. A slice that began off the grid of blocks would move that end, and a few elements
would differ in their last bit. So every slice begins at a multiple of `GRID` elements of its own
parameter, and a parameter's tail is always the tail of its last slice. Parameters are never joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GRID", "Slice", "Window", "cut_windows", "elements_per_window"]

GRID = 64
"""Elements. A multiple of the SIMD width of every kernel of torch, at every dtype."""


class Slice(NamedTuple):
    """A range of one parameter's elements, in the order of its memory.

    Attributes:
        parameter: Which parameter, by its place in what was cut.
        start: The first element; a multiple of `GRID`.
        stop: One past the last element.
        number: Which slice of its parameter, from 0.
        is_last: Whether the parameter ends here.
    """

    parameter: int
    start: int
    stop: int
    number: int
    is_last: bool

    @property
    def numel(self) -> int:
        """How many elements the slice has; 0 only for an empty parameter."""
        return self.stop - self.start


Window = tuple[Slice, ...]


def cut_windows(numels: Sequence[int], elements: int) -> list[Window]:
    """Cut parameters into windows, in their order.

    Args:
        numels: The number of elements of each parameter.
        elements: The most elements of a window; at least `GRID`.

    Returns:
        The windows. Together they hold every element once; none is empty.
    """
    assert elements >= GRID, "no slice would fit"
    windows: list[Window] = []
    window: list[Slice] = []
    room = elements
    for parameter, numel in enumerate(numels):
        start = number = 0
        while True:
            stop = _end(start, numel, room)
            if stop > start or numel == 0:
                window.append(Slice(parameter, start, stop, number, stop == numel))
                room -= stop - start
                start, number = stop, number + 1
            if start == numel:
                break
            windows.append(tuple(window))
            window, room = [], elements
    return [*windows, tuple(window)] if window else windows


def _end(start: int, numel: int, room: int) -> int:
    """Where a slice ends that begins at `start`: with its parameter, or on the grid."""
    if numel - start <= room:
        return numel
    return start + room // GRID * GRID


def elements_per_window(numels: Sequence[int], times: int) -> int:
    """The smallest size of a window with which there are at most `times` of them.

    Since slices begin on the grid, a window may stay short of its size by less than `GRID`
    elements, so that the size is a little over `sum(numels) / times`.
    """
    elements = max(GRID, math.ceil(sum(numels) / times / GRID) * GRID)
    while len(cut_windows(numels, elements)) > times:
        elements += GRID
    return elements
