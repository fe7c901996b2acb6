"""Opening a context while a module runs forward, through hooks alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["AroundForward", "around_forward"]


class _Open(threading.local):
    """The contexts that are open on this thread, innermost last."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []


class _Hook:
    """A hook that a copy of the module shares, and that a pickle of it leaves behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()


class _Enter(_Hook):
    def __init__(self, open_context: Callable[[], AbstractContextManager[Any]], to: _Open) -> None:
        self._open_context = open_context
        self._open = to

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        context = self._open_context()
        context.__enter__()
        self._open.contexts.append(context)


class _Leave(_Hook):
    def __init__(self, to: _Open) -> None:
        self._open = to

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # Nothing is open when somebody else's hook raised before ours could run.
        if torch.compiler.is_compiling() or not self._open.contexts:
            return
        self._open.contexts.pop().__exit__(None, None, None)


class AroundForward:
    """The hooks that `around_forward` registered."""

    def __init__(self, *handles: RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take the hooks off the module. A second call does nothing."""
        for handle in self._handles:
            handle.remove()


def around_forward(
    module: nn.Module, open_context: Callable[[], AbstractContextManager[Any]]
) -> AroundForward:
    """Run every forward of `module` inside a context.

    The context is left also when forward raises, and is one per call and thread, so recursive
    and concurrent calls do not meet. While `torch.compile` traces the module the hooks do
    nothing. A deep copy of the module shares the hooks; a pickle of it leaves them behind.

    Args:
        module: Keeps its class, its `forward` and its state dict.
        open_context: Makes the context of one call.

    Returns:
        An object whose `remove()` takes the hooks off again.
    """
    to = _Open()
    return AroundForward(
        module.register_forward_pre_hook(_Enter(open_context, to), prepend=True),
        module.register_forward_hook(_Leave(to), always_call=True),
    )


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
