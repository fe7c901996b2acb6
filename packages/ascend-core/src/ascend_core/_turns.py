"""Turns at the state that belongs to the process: the default generators, the default dtype.

Two threads that each set such state and put it back would take it from each other, so a replay
holds its turn while it runs. What a replay calls may replay in turn, also in another thread:
autograd runs the backward of a device in that device's thread, while the caller waits for it.

[Note: a turn within a turn]
A lock that only its thread may take twice would let those two wait for each other for ever. So
each turn brings a lock of its own, for the turns that are taken within it: they exclude one
another, and never the one that waits for them. Which turn a thread is in, torch's own
thread-local objects tell, since autograd hands them on from the thread that called backward to
those that work for it. (Neither `threading.local` nor `contextvars` are handed on.)

What remains: a replay that takes a gradient through a graph, on which another thread of the user's
own runs backward meanwhile and replays. Autograd's node and the turn may then wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["taking_turns"]

_KEY = "ascend_core.turn"


class _Turn:
    def __init__(self) -> None:
        self.inner = threading.Lock()


_OUTSIDE_OF_ANY = _Turn()


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Keep the process's state to the `with` block, and to what it calls."""
    outer = _current()
    with outer.inner:
        torch._C._stash_obj_in_tls(_KEY, _Turn())
        try:
            yield
        finally:
            torch._C._stash_obj_in_tls(_KEY, outer)


def _current() -> _Turn:
    if not torch._C._is_key_in_tls(_KEY):
        return _OUTSIDE_OF_ANY
    turn = torch._C._get_obj_in_tls(_KEY)
    assert isinstance(turn, _Turn)
    return turn
