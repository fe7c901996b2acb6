"""Opening a context around every call of one module.

[Note: a subclass, not hooks]
A pair of forward hooks could open and close the context, but PyTorch skips even `always_call` hooks
when the call ends in a KeyboardInterrupt: after one Ctrl-C in a notebook the context would stay
open for ever. So the module instance is given a generated subclass of its class, as `fully_shard`
does, whose call runs in a `with`. Its forward, its state dict and its name stay as they are, it is
an instance of all it was an instance of, and copies and pickles of it are of its own class.
"""

from __future__ import annotations

import copyreg
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["AroundForward", "around_forward"]

OpenContext = Callable[[], AbstractContextManager[Any]]


class AroundForward:
    """One context around the calls of one module, until it is removed."""

    def __init__(self, module: nn.Module, open_context: OpenContext) -> None:
        self.open_context: OpenContext | None = open_context
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Open the context no more, and give the module its class back.

        The class stays where somebody else has built on it since; it does nothing then. A second
        call does nothing.
        """
        self.open_context = None
        module = self._module()
        if module is None:
            return
        kind = type(module)
        while _is_spent(kind):
            kind = kind.__bases__[0]
        module.__class__ = kind


def around_forward(module: nn.Module, open_context: OpenContext) -> AroundForward:
    """Run every call of `module` inside a context.

    The context is left however the call ends, and is one per call, so recursive and concurrent
    calls do not meet. While `torch.compile` traces the module nothing is opened.

    Args:
        module: Becomes an instance of a generated subclass of its class.
        open_context: Makes the context of one call.

    Returns:
        An object whose `remove()` undoes it.
    """
    around = AroundForward(module, open_context)
    module.__class__ = _scoped(type(module), around)
    return around


def _scoped(base: type[nn.Module], around: AroundForward) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        open_context = around.open_context
        if open_context is None or torch.compiler.is_compiling():
            return base.__call__(self, *args, **kwargs)
        with open_context():
            return base.__call__(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        reduced = base.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the base has its own way, or is a scoped class itself
        return (base.__new__, (base,), *reduced[2:])

    body = {
        "__call__": __call__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_ascend_scope": around,
    }
    scoped: type[nn.Module] = types.new_class(
        base.__name__, (base,), exec_body=lambda namespace: namespace.update(body)
    )
    return scoped


def _is_spent(kind: type[nn.Module]) -> bool:
    around = vars(kind).get("_ascend_scope")
    return isinstance(around, AroundForward) and around.open_context is None
