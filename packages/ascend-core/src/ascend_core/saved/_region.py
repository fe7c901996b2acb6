"""Entering and leaving the reach of keepers."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from ascend_core.saved._frame import Frame, Hooks
from ascend_core.saved.keeper import Keeper


class _Frames(threading.local):
    """The frames that are open on this thread, with the pairs they pushed; empty when none is."""

    def __init__(self) -> None:
        self.stack: list[tuple[Frame, Hooks]] = []


# Hook stacks are per thread in PyTorch, so this one is too.
_FRAMES = _Frames()


class Region:
    """A context manager in which `keepers` decide about saved tensors.

    Entering costs nothing where nothing is saved (grad mode off, inference mode, inside
    `torch.func` transforms, while `torch.compile` or `torch.jit` traces). Otherwise the region
    joins the frame that is open on this thread, or opens one when there is none or when somebody
    else's hooks were entered since.
    """

    __slots__ = ("_frame", "_keepers", "_opened")

    def __init__(self, *keepers: Keeper) -> None:
        self._keepers = keepers
        self._frame: Frame | None = None
        self._opened = False

    @property
    def frame(self) -> Frame | None:
        """The frame that this region works in; None while it is not entered or has no effect."""
        return self._frame

    def __enter__(self) -> Region:
        assert self._frame is None, "a Region is entered once at a time"
        if not _tensors_are_saved():
            return self
        top = _top_hooks()
        stack = _FRAMES.stack
        joins = bool(stack) and top is not None and top[0] is stack[-1][1][0]
        frame = stack[-1][0] if joins else Frame(top)
        try:
            if not joins:
                hooks = frame.hooks()
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                stack.append((frame, hooks))
                self._opened = True
            for keeper in reversed(self._keepers):
                frame.enter(keeper)
        except BaseException:  # a KeyboardInterrupt, say: no `__exit__` follows it
            self._close(frame)
            raise
        self._frame = frame
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        frame, self._frame = self._frame, None
        if frame is None:
            return
        try:
            for keeper in self._keepers:
                frame.leave(keeper)
        finally:
            self._close(frame)

    def _close(self, frame: Frame) -> None:
        """Pop the hooks that this region pushed, if it did."""
        if self._opened:
            self._opened = False
            torch._C._autograd._pop_saved_tensors_default_hooks()
            opened, _ = _FRAMES.stack.pop()  # (not within the assertion, which `python -O` drops)
            assert opened is frame, "regions are left in the order of entering"
            frame.close()


def region(*keepers: Keeper) -> Region:
    """Let keepers decide what becomes of each tensor that autograd saves inside the block.

    Args:
        keepers: Asked in this order, and before the keepers of regions further out; those that move
            tensors after all that do not.

    Returns:
        A context manager, to be entered once.

    Example:
        >>> with region(keeper):
        ...     loss = model(batch)
        >>> loss.backward()
    """
    return Region(*keepers)


def _tensors_are_saved() -> bool:
    return (
        torch.is_grad_enabled()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
    )


def _top_hooks() -> Hooks | None:
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks
