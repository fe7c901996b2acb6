"""Functions that PyTorch sees nothing of, as operators that may be run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["FusedActivation", "run_fused"]


class FusedActivation:
    """An opaque activation function, made one operator whose output can be rebuilt.

    A `torch.autograd.Function` does not show where operators are recorded, so what it returns is
    kept as in the plain run. Called by way of an object of this class it shows, and
    `recompute_activation` rebuilds its output, provided that it saves its inputs.

    The function must compute one tensor from its arguments alone, write to none of them, draw no
    random numbers, and give the same bits each time.

    Args:
        function: For example `MyFunction.apply`. It lives as long as graphs that it made.

    Example:
        >>> fused_gelu = FusedActivation(BiasGelu.apply)
        >>> y = down(fused_gelu(up(x), bias))
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function."""
        return run_fused(self, *args, **kwargs)


def run_fused(activation: FusedActivation, *args: Any, **kwargs: Any) -> Tensor:
    """Call the function of a `FusedActivation`; shows to function modes under this name."""
    tensors = tuple(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    if has_torch_function(tensors):
        result: Tensor = handle_torch_function(run_fused, tensors, activation, *args, **kwargs)
        return result
    return activation.function(*args, **kwargs)
