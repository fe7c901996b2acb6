"""What a parameter is while its new values travel: it waits for them when it is read.

[Note: who may read a weight that travels]
A step returns while weights are still gathered. The forward of a module waits for the buckets of
its own parameters, by a hook. But there are other readers: a head that uses the embedding's weight,
a moving average, a checkpoint, a norm that is logged, a list of parameters that somebody keeps. So
a parameter that travels is given a subclass of its own class, as `fully_shard` gives one to
modules, and all that torch is asked to do with it passes through that subclass: it waits first.
What is no reading, such as the shape or the gradient, does not wait. When the values have arrived
the parameter is a plain `nn.Parameter` again, and nothing is asked any more.

Memory that was reached before (`p.data_ptr()`, `p.data`, a NumPy array) is beyond this: what keeps
such must call `wait()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["travelling"]

# What tells of a parameter without reading a value. The first are attributes, got or set.
_ATTRIBUTES = frozenset(
    {
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "device",
        "dtype",
        "grad",
        "grad_dtype",
        "grad_fn",
        "is_leaf",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
    }
)
_METHODS = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.is_floating_point,
    }
)


def travelling(arrive: Callable[[], None]) -> type[nn.Parameter]:
    """Make the class of the parameters of one bucket while they travel.

    Args:
        arrive: Waits for the bucket, and gives its parameters their own class back.
    """

    class Travelling(nn.Parameter):
        """A parameter whose new values are on their way."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if _only_tells(func):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            for kind in types:
                if hasattr(kind, "arrive"):
                    kind.arrive()
            return func(*args, **(kwargs or {}))

        @staticmethod
        def arrive() -> None:
            arrive()

        def __deepcopy__(self, memo: Any) -> Any:
            arrive()  # first: a copy is made of the class that a parameter has
            return nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]

    return Travelling


def _only_tells(func: Any) -> bool:
    if func in _METHODS:
        return True
    owner = getattr(func, "__self__", None)
    is_accessor = getattr(func, "__name__", "") in ("__get__", "__set__")
    return is_accessor and getattr(owner, "__name__", "") in _ATTRIBUTES
