"""The hook that tells a reducer that its module was called."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ascend_core.errors import ConfigError

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
        """The module was called.

        Raises:
            ConfigError: When its gradients are reduced no more, since nothing is left of them.
        """
        if torch.compiler.is_compiling() or self._reducer is None:
            return
        reducer = self._reducer()
        if reducer is not None:
            reducer.called(output)
        elif torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            raise ConfigError(
                "nobody reduces the gradients of the model any more.",
                why="reduce_gradients works as long as a parameter lives that required a gradient "
                "then: all of them were exchanged since, as load_state_dict(assign=True) does, or "
                "there was none.",
                instead="call reduce_gradients behind that; or keep its handle, if it was frozen.",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Called, ()
