"""Saved parameters keep their storage, and their Python attributes.

[Note: attributes of a saved parameter]
With any pair of hooks, autograd wraps what unpack returns in a new tensor, so code in a backward
that reads `weight.main_grad` from its saved tensors (megatron's fused gradient accumulation does)
finds nothing. The new tensor is made by `detach`, and a wrapper subclass decides what its own
`detach` returns: an alias of the parameter that shares the parameter's attribute dictionary, so
that the backward reads and writes the attributes of the parameter itself. The wrapper is used
only for parameters that carry attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "AsStrided", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
        "T", "ToCopy", "Transpose", "Unsqueeze", "UnsafeView", "View", "Clone", "Unbind",
    )
)  # fmt: skip


def is_weight(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter, a view of one, or a cast or copy of one.

    True for any leaf that requires grad and for what is derived from one by views, casts and
    copies alone: such bytes belong to the model (or to autocast's cache of its weights), and
    moving or rebuilding them wins nothing.
    """
    if tensor.is_leaf:
        return tensor.requires_grad
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


class WithAttributes(Tensor):
    """Stands for a parameter until autograd detaches it (the note above says why)."""

    _parameter: Tensor

    @staticmethod
    def __new__(cls: type[WithAttributes], parameter: Tensor) -> WithAttributes:
        """Make a stand-in that holds no bytes of its own."""
        stand_in: WithAttributes = Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            storage_offset=parameter.storage_offset(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        stand_in._parameter = parameter
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        """Give autograd an alias of the parameter that shares its attributes."""
        assert function is torch.ops.aten.detach.default, f"autograd asked for {function}"
        parameter = args[0]._parameter
        alias = Tensor.detach(parameter)
        alias.__dict__ = parameter.__dict__
        return alias
