"""What autograd sees inside a recorded call that is made of several operators.

[Note: the product inside a norm]
Where torch has no kernel for it (on a CPU, say) `F.rms_norm` is a composite, and autograd sees
its parts: `n = x * rsqrt(mean(x ** 2) + eps)`, and `n * weight`. The last product saves `n`, which
is as large as `x`. But the product that made `n` has saved both of its factors, so `n` can be
made again of what that very node holds. And the norm's output can be made of `n`, which takes
less than to run the norm again.

That a saved tensor is such a product shows in the graph, and the product's node tells what it has
saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ascend_core.saved import PackedParameter, Saved, StorageRecord
from ascend_recompute._nodes import name
from ascend_recompute._recipe import Made, Operand

COMPOSITES = frozenset((F.rms_norm, torch.rms_norm))
"""The calls to look into."""

# A product that is saved, and before it the two tensors that it was made of.
_FEWEST_SAVES = 3


class Parts:
    """What one call saves while it is under way.

    Attributes:
        label: The module that makes the call.
    """

    __slots__ = ("_product", "_records", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self._records: dict[int, StorageRecord] = {}  # by the serial of the save
        self._product: Operand | None = None

    def product(self, tensor: Tensor, record: StorageRecord, serial: int) -> Made | None:
        """How a tensor that the call saves was made, if it is the product of two others.

        Args:
            tensor: What is saved.
            record: Its storage.
            serial: The serial of the save.
        """
        self._records[serial] = record
        if len(self._records) < _FEWEST_SAVES:
            return None
        factors = _factors(tensor.grad_fn)
        operands = [operand for saved in factors if (operand := self._operand(saved))]
        if len(operands) < 2:
            return None
        self._product = Operand.of(tensor, record)
        serials = [saved.serial for saved in factors]
        own = range(min(serials), max(serials) + 1)
        return Made(torch.mul, tuple(operands), (), own, (own,))

    def shorten(self, made: Made, output: Tensor) -> None:
        """Let the call's output be made of a product inside it, if it is that times a parameter.

        Args:
            made: The call as it was written down.
            output: What it returned.
        """
        product = self._product
        if product is None:
            return
        node: Any = output.grad_fn
        if name(node) == "ToCopyBackward0":
            node, _ = node.next_functions[0]
        factors = _factors(node)
        if not any(_is_save_of(saved, product.record) for saved in factors):
            return
        parameters = [saved.alias for saved in factors if isinstance(saved, PackedParameter)]
        for operand in made.operands():
            if any(operand.is_of(parameter) for parameter in parameters):
                made.function, made.names = scaled, ()
                made.values = product, operand, output.dtype
                return

    def _operand(self, saved: Saved) -> Operand | None:
        """A tensor that the call has saved, as it was then."""
        record = self._records.get(saved.serial)
        if record is None or not _is_save_of(saved, record):  # another frame counts for itself
            return None
        return Operand.of_saved(saved, record)


def _factors(node: Any) -> tuple[Saved, ...]:
    """What a product of two tensors has saved, when both are there; nothing for other nodes.

    Where both need a gradient, each is saved for that of the other.
    """
    if name(node) != "MulBackward0" or any(behind is None for behind, _ in node.next_functions):
        return ()
    factors = node._raw_saved_self.data, node._raw_saved_other.data
    # (Something else where no hooks of ours were in force.)
    return factors if all(isinstance(saved, Saved) for saved in factors) else ()


def _is_save_of(saved: Saved, record: StorageRecord) -> bool:
    return any(saved is held for held in record.saved(saved.version))


def scaled(product: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(product, factor).to(dtype)
