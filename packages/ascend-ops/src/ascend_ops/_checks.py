"""What every operator demands of the tensors that it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_core.errors import ConfigError

__all__ = ["check_dtype", "check_same"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(operator: str, **tensors: Tensor | None) -> None:
    """Refuse what is no tensor of a floating dtype that the operators know.

    Raises:
        ConfigError: Names the first that is not.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{operator}: {name} is {tensor.dtype}.",
                why="it is computed in FP32, BF16, FP16 or FP64.",
                instead=f"cast {name} to one of them.",
            )


def check_same(operator: str, what: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that differ in an attribute: `dtype`, `device` or `shape`.

    Raises:
        ConfigError: Names the first two that differ.
    """
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first, one = given[0]
    for name, other in given[1:]:
        if getattr(one, what) != getattr(other, what):
            raise ConfigError(
                f"{operator}: {first} and {name} differ in {what}.",
                why=f"they are {getattr(one, what)} and {getattr(other, what)}.",
                instead=f"give both the same {what}.",
            )
