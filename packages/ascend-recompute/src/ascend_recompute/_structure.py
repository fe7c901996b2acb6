"""The leaves of a call's arguments and results, and the call made of its leaves again.

As torch's pytree has them, which costs 10 us for each use; nearly every call is flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_LEAVES = (Tensor, NoneType, bool, int, float, str, torch.dtype, torch.device)

Call = tuple[Sequence[Any], dict[str, Any]]


def leaves_of(value: Any) -> list[Any]:
    """The leaves of what a function returned."""
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


class CallStructure:
    """How the arguments of one call nest. Holds none of them."""

    __slots__ = ("_spec",)

    def __init__(self, spec: pytree.TreeSpec | None) -> None:
        self._spec = spec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], CallStructure]:
        """The leaves of the arguments, in order, and how they nest."""
        if not kwargs and all(isinstance(value, _LEAVES) for value in args):
            return list(args), cls(None)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return leaves, cls(spec)

    def call(self, leaves: list[Any]) -> Call:
        """Arguments that nest the same way, with other leaves."""
        if self._spec is None:
            return leaves, {}
        call: Call = pytree.tree_unflatten(leaves, self._spec)
        return call
