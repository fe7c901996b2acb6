"""Operands of which a call saved a copy in a wider type in their place.

[Note: an operand and its wider copy]
A norm that computes in FP32 saves a copy of its BF16 input: autocast makes it on cuda and npu,
`F.rms_norm` makes it itself. Nobody may hold the input then, and the norm's output could not be
made again. But FP32 holds every value of BF16 and of FP16, so casting the copy back gives the
input to the bit (a NaN may become another NaN).

That a saved tensor is a copy of an operand shows in the graph: a cast stands before it, and that
cast's edge is the operand's own. And the cast was made within the call, so that nothing was
written to the operand in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ascend_core.layout import Layout, fills_storage
from ascend_core.saved import StorageRecord
from ascend_recompute._nodes import name
from ascend_recompute._recipe import Made, Operand

_NARROW = (torch.bfloat16, torch.float16)


class Widened:
    """The wider copies that one call has saved."""

    __slots__ = ("_copies", "_since")

    def __init__(self) -> None:
        self._since: int = torch._C._autograd._get_sequence_nr()
        self._copies: dict[tuple[Any, int], Operand] = {}

    def __bool__(self) -> bool:
        return bool(self._copies)

    def note(self, tensor: Tensor, record: StorageRecord) -> None:
        """Look at what the call saves."""
        if tensor.dtype is not torch.float32:
            return
        node: Any = tensor.grad_fn
        if name(node) == "ToCopyBackward0" and node._sequence_nr() >= self._since:
            self._copies[node.next_functions[0]] = Operand.of(tensor, record)

    def complete(self, made: Made, values: tuple[Any, ...]) -> None:
        """Add to a call's operands how to make them from their copies.

        Args:
            made: The call as it was written down.
            values: Its arguments, as they were passed.
        """
        for value in values:
            copy = self._copy_of(value) if isinstance(value, Tensor) else None
            if copy is not None:
                made.values = tuple(
                    operand._replace(narrowed=_cast_back(copy, value, made))
                    if isinstance(operand, Operand) and operand.is_of(value)
                    else operand
                    for operand in made.values
                )

    def _copy_of(self, value: Tensor) -> Operand | None:
        if value.dtype not in _NARROW or not value.requires_grad or not Layout.fits(value):
            return None
        if not fills_storage(value):
            return None
        edge = get_gradient_edge(value)
        copy = self._copies.get((edge.node, edge.output_nr))
        return copy if copy is not None and copy.layout.size == value.size() else None


def _cast_back(copy: Operand, value: Tensor, call: Made) -> Made:
    back = Made(Tensor.to, (copy, value.dtype), (), range(0), ())
    back.returned(value, call.modes, call.tally, call.label)
    return back
