"""Doing something around every call of one module, or computing its forward otherwise.

[Note: a subclass, not hooks]
A pair of forward hooks could open and close a context, but PyTorch skips even `always_call` hooks
when the call ends in a KeyboardInterrupt: after one Ctrl-C in a notebook the context would stay
open for ever. So the module instance is given a generated subclass of its class, as `fully_shard`
does, whose call goes by way of ours. Its forward, its state dict and its name stay as they are, it
is an instance of all it was an instance of, and copies and pickles of it are of its own class.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = [
    "AroundCall",
    "Call",
    "Compute",
    "around_call",
    "around_forward",
    "instead_of_forward",
    "owners",
]

OpenContext = Callable[[], AbstractContextManager[Any]]
Call = Callable[..., Any]
Run = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
Compute = Callable[[nn.Module, Call, tuple[Any, ...], dict[str, Any]], Any]


class AroundCall:
    """What is done around the calls of one module, or instead of its forward, until it is removed.

    Attributes:
        run: Is given the module's own call (or forward) with its arguments, and returns the
            result; None once it was removed.
        owner: Who put it there.
    """

    def __init__(self, module: nn.Module, run: Call, owner: object) -> None:
        self.run: Call | None = run
        self.owner = owner
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Do no more, and give the module its class back.

        The class stays where somebody else has built on it since; it does nothing then. A second
        call does nothing.
        """
        self.run = self.owner = None
        module = self._module()
        if module is None:
            return
        kind = type(module)
        while _is_spent(kind):
            kind = kind.__bases__[0]
        module.__class__ = kind


def around_call(module: nn.Module, run: Run, owner: object = None) -> AroundCall:
    """Hand every call of `module` to `run`.

    While `torch.compile` traces the module it is called as ever.

    Args:
        module: Becomes an instance of a generated subclass of its class.
        run: Called with the module's own call, its positional and its keyword arguments. May run
            on several threads at once, and inside itself.
        owner: Whose doing this is, for `owners`.

    Returns:
        An object whose `remove()` undoes it.
    """
    around = AroundCall(module, run, owner)
    module.__class__ = _scoped(type(module), around, _call_of)
    return around


def instead_of_forward(module: nn.Module, compute: Compute, owner: object = None) -> AroundCall:
    """Compute what `module.forward` does by `compute`, also while `torch.compile` traces.

    The module's hooks run as ever: before it, and after it.

    Args:
        module: Becomes an instance of a generated subclass of its class. A `forward` that was set
            on the module itself is called before that of any class: then nothing changes.
        compute: Called with the module, its own forward (which needs the arguments alone, and need
            not be called), its positional and its keyword arguments. May run on several threads at
            once.
        owner: Whose doing this is, for `owners`.

    Returns:
        An object whose `remove()` undoes it.
    """
    around = AroundCall(module, compute, owner)
    module.__class__ = _scoped(type(module), around, _forward_of)
    return around


def around_forward(
    module: nn.Module, open_context: OpenContext, owner: object = None
) -> AroundCall:
    """Run every call of `module` inside a context.

    The context is left however the call ends, and is one per call, so recursive and concurrent
    calls do not meet. While `torch.compile` traces the module nothing is opened.

    Args:
        module: Becomes an instance of a generated subclass of its class.
        open_context: Makes the context of one call.
        owner: Whose doing this is, for `owners`.

    Returns:
        An object whose `remove()` undoes it.
    """

    def run(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with open_context():
            return call(*args, **kwargs)

    return around_call(module, run, owner)


def owners(module: nn.Module) -> list[object]:
    """Who does something around the calls of `module`, innermost last."""
    arounds = [vars(kind).get("_ascend_scope") for kind in type(module).__mro__]
    return [around.owner for around in arounds if isinstance(around, AroundCall) and around.owner]


def _call_of(base: type[nn.Module], around: AroundCall) -> dict[str, Call]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        run = around.run
        if run is None or torch.compiler.is_compiling():
            return base.__call__(self, *args, **kwargs)
        return run(types.MethodType(base.__call__, self), args, kwargs)

    return {"__call__": __call__}


def _forward_of(base: type[nn.Module], around: AroundCall) -> dict[str, Call]:
    @functools.wraps(base.forward)  # whose signature others read
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = around.run
        if run is None:
            return base.forward(self, *args, **kwargs)
        own = functools.partial(base.forward, self)  # as a method, `torch.compile` refuses it
        return run(self, own, args, kwargs)

    return {"forward": forward}


def _scoped(
    base: type[nn.Module],
    around: AroundCall,
    methods: Callable[[type[nn.Module], AroundCall], dict[str, Call]],
) -> type[nn.Module]:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        reduced = base.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the base has its own way, or is a scoped class itself
        return (base.__new__, (base,), *reduced[2:])

    body = methods(base, around) | {
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
    return isinstance(around, AroundCall) and around.run is None
