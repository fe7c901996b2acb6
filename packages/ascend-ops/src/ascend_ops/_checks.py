"""What every operator demands of the tensors that it is given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ascend_core.errors import ConfigError

__all__ = ["check_derivative", "check_dtype", "check_same", "has_tangent"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(operator: str, **tensors: Tensor | None) -> None:
    """Refuse what is no dense floating tensor, or has a derivative that is not known here.

    Raises:
        ConfigError: Names the first such.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{operator}: {name} is {tensor.dtype}.",
                why="it is computed in FP32, BF16, FP16 or FP64.",
                instead=f"cast {name} to one of them.",
            )
        if tensor is not None and tensor.layout != torch.strided:
            raise ConfigError(
                f"{operator}: {name} is of layout {tensor.layout}.",
                why="its elements are not all in memory.",
                instead=f"pass {name}.to_dense().",
            )
        if tensor is not None:
            check_derivative(operator, name, tensor)


def check_derivative(operator: str, name: str, tensor: Tensor) -> None:
    """Refuse what carries a derivative that would be lost, or end in an error of torch's own.

    Raises:
        ConfigError: Where a transform of `torch.func` or forward-mode AD follows it.
    """
    if torch.compiler.is_compiling():
        return
    if not (torch._C._functorch.is_gradtrackingtensor(tensor) or has_tangent(tensor)):
        return
    raise ConfigError(
        f"{operator}: {name} is differentiated by torch.func or by forward-mode AD.",
        why="its gradient is for backward: `loss.backward()`, torch.autograd.grad.",
        instead=f"use ascend_ops.reference.{operator} there, which is made of torch's operators.",
    )


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode AD follows it."""
    primal_and_tangent = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return primal_and_tangent.tangent is not None


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
