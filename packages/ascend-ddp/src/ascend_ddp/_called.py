"""The hook that tells a reducer that its module was called."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ascend_ddp._reducer import Reducer

__all__ = ["Called"]


class Called:
    """A forward hook. In a copy or a pickle of the module it does nothing: nobody reduces that.

    Args:
        reducer: Is told. The hooks of parameters keep it alive, not this one.
    """

    def __init__(self, reducer: Reducer | None = None) -> None:
        self._reducer = None if reducer is None else weakref.ref(reducer)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The module was called."""
        if torch.compiler.is_compiling() or self._reducer is None:
            return
        reducer = self._reducer()
        if reducer is not None:
            reducer.called(output)

    def __reduce__(self) -> tuple[Any, ...]:
        return Called, ()
