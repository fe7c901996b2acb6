"""Autograd's backwards: which one runs, and how one is told that it has ended.

[Note: the end of a backward]
A backward may run inside another one (reentrant checkpointing), and a callback that is asked for
inside is called at the end of the inner one. So it is asked for when backward reaches the chunk's
output, outside. Where the chunk was not called as a whole, the end of an inner one is known by the
Python frames above, and the callback is asked for again by the next gradient. If none comes any
more, the round is ended by whatever needs it: the next backward, `wait()`, or an optimizer's step.

An exception in a backward leaves a callback that died uncalled, by which the next round knows. It
dies a moment after the exception is raised, where a thread of autograd still has it. So the next
backward, which autograd gives another number, waits for its death; and what comes when no backward
runs need not ask.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

__all__ = ["End", "Ends", "is_inside", "running_task"]


class End:
    """What autograd calls when a backward has ended. It dies without a call when that fails.

    Args:
        reached: Is called.
    """

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached

    def __call__(self) -> None:
        """The backward has ended."""
        self._reached()


class Ends:
    """The end that was asked for last, when a backward had reached a chunk's output."""

    def __init__(self) -> None:
        self._end: weakref.ref[End] | None = None
        self._task: int | None = None

    def expect(self, reached: Callable[[], None]) -> None:
        """Ask for the end of the backward that runs, unless that was done."""
        task = running_task()
        # The end of a backward that has failed may live on for a moment, in another thread.
        is_another = task is not None and task != self._task
        if _gone(self._end) or is_another:
            self._end, self._task = _ask(reached), task

    def of(
        self, task: int | None, reached: Callable[[], None]
    ) -> tuple[weakref.ref[End], int | None]:
        """The end of the backward that runs, and its number; ask for it where it is not known."""
        if self._end is not None and not _gone(self._end) and task in (None, self._task):
            return self._end, self._task
        return _ask(reached), task


def _ask(reached: Callable[[], None]) -> weakref.ref[End]:
    end = End(reached)
    Variable._execution_engine.queue_callback(end)
    return weakref.ref(end)


def _gone(end: weakref.ref[End] | None) -> bool:
    return end is None or end() is None


def running_task() -> int | None:
    """Autograd's number of the backward that this thread runs: -1 for none, None within another."""
    return None if is_inside() else torch._C._current_graph_task_id()


def is_inside() -> bool:
    """Whether a Python function's backward is being run by this thread."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# What autograd calls to run the backward of a Python function.
_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__
