"""One bucket: a flat tensor in which the gradients of some parameters are views.

[Note: who holds a gradient when]
Between backwards, `p.grad` *is* the bucket's view, so that autograd adds to it where it lies. It is
None where nothing was accumulated since the last `zero_grad()`: then autograd leaves the first
gradient that arrives in a tensor of its own, and the hook copies it into the view.
In the backward that sends, the hook of a gradient that is whole multiplies while it copies, so that
nothing passes over the bucket a second time. `p.grad` is None from then on: what would be added to
it would not be multiplied.
While a bucket travels, `p.grad` of all its parameters is None: what is accumulated then, by a
parameter whose gradient comes in several parts, cannot reach the buffer that the collective reads
and writes. It lands in a tensor of its own, and is known as late. When the bucket has arrived,
`p.grad` is the view again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ascend_core.device import backend_of
from ascend_core.layout import Layout
from ascend_ddp._parameters import Parameters
from ascend_ddp._plan import BucketPlan, Slot

__all__ = ["Bucket", "view_of"]


class Bucket:
    """The gradients of some parameters, as one flat tensor.

    Args:
        plan: Its slots.
        parameters: All of the chunk's; slots name them by their index.
        dtype: In which gradients are added up.
        ranks: In how many parts it is scattered; 0 where it is not.

    Attributes:
        flat: [plan.numel]; what is between the slots is zero, and stays so.
        shard: [plan.numel / ranks]: this rank's part of the sums, where gradients are scattered.
        backend: Of its device.
        device: Where it is; asked for once, since a gradient is a matter of microseconds.
        work: The collective, while it travels.
        missing: How often gradients of its parameters are still to come, until it is full.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Parameters,
        dtype: torch.dtype | None,
        ranks: int,
    ) -> None:
        self.plan = plan
        first = parameters[plan.slots[0].parameter]
        self.flat = torch.zeros(plan.numel, dtype=dtype or first.dtype, device=first.device)
        self.shard = torch.zeros_like(self.flat[: plan.numel // ranks]) if ranks else None
        self.backend = backend_of(self.flat)
        self.device = self.flat.device
        self.work: distributed.Work | None = None
        self.missing = 0
        self._multiplied: set[int] = set()  # slots that are ready to travel
        self._parameters = parameters
        self._views = {
            slot.parameter: view_of(self.flat, slot, parameters[slot.parameter])
            for slot in plan.slots
        }

    @property
    def indices(self) -> list[int]:
        """The parameters, in the order of their slots."""
        return [slot.parameter for slot in self.plan.slots]

    def view(self, index: int) -> Tensor:
        """The gradient of a parameter, of its shape and strides."""
        return self._views[index]

    def holds(self, index: int) -> bool:
        """Whether `p.grad` is the view: gradients were accumulated since the last zero_grad."""
        return self._parameters[index].grad is self._views[index]

    def fold(self, index: int) -> None:
        """Let `p.grad` be the view, with the values that it has; nothing where it is None."""
        parameter = self._parameters[index]
        grad = parameter.grad
        if grad is not None:
            self.take(index, parameter, grad)

    def take(self, index: int, parameter: nn.Parameter, grad: Tensor) -> None:
        """Let the gradient of a parameter, `p.grad`, be the view; nothing where it is.

        Nothing, too, where the view is multiplied already: `let_go` adds it then.
        """
        view = self._views[index]
        if grad is view or index in self._multiplied:
            return
        view.copy_(grad.detach() if grad.requires_grad else grad)
        if grad.dtype == view.dtype:
            parameter.grad = view
        else:
            self._let_be(parameter, view)

    def await_all(self) -> None:
        """Begin to fill: it misses the gradients of all of its parameters."""
        self.missing = len(self.plan.slots)
        self._multiplied.clear()  # where a backward failed, before it left

    def take_whole(self, index: int, parameter: nn.Parameter, grad: Tensor, factor: float) -> None:
        """Take a gradient, `p.grad`, that is ready to travel but for a factor."""
        view = self._views[index]
        if grad is view or grad.dtype != view.dtype or factor == 1:
            self.take(index, parameter, grad)  # and `let_go` multiplies
            return
        plain = grad.detach() if grad.requires_grad else grad
        if index in self._multiplied:  # a part that was not expected
            view.add_(plain, alpha=factor)
        else:
            torch.mul(plain, factor, out=view)
            self._multiplied.add(index)
        parameter.grad = None

    def let_go(self, factor: float) -> list[bool]:
        """Make ready to travel: no `p.grad` is a view, and slots without a gradient are zero.

        Args:
            factor: By which gradients are multiplied, unless they were when they were taken.

        Returns:
            For each slot whether it has a gradient.
        """
        held, left = [], []
        for index, view in self._views.items():
            parameter = self._parameters[index]
            grad = parameter.grad
            is_multiplied = index in self._multiplied
            held.append(is_multiplied or grad is not None)
            if is_multiplied:
                if grad is not None:
                    self._add_left(view, grad.detach(), factor)
            elif grad is None:
                view.zero_()
            else:
                self.take(index, parameter, grad)
                left.append(view)
            self._let_be(parameter, None)
        if factor != 1:
            for part in left if self._multiplied else [self.flat]:
                part.mul_(factor)
        self._multiplied.clear()
        return held

    def _add_left(self, view: Tensor, part: Tensor, factor: float) -> None:
        """Add what came to `p.grad` behind a gradient that was whole."""
        view.add_(part, alpha=factor)
        # Another stream may have made it, whose memory it goes back to.
        self.backend.record_stream(part, self.backend.current_stream(self.device))

    def add(self, index: int, part: Tensor, rank: int) -> None:
        """Add what was summed behind the bucket to a parameter's sums, wherever those are."""
        if self.shard is None:
            self._views[index].add_(part)
            return
        self.flat.zero_()
        self._views[index].copy_(part)
        size = self.shard.numel()
        self.shard.add_(self.flat[rank * size : (rank + 1) * size])

    def show(self, rank: int, others: Tensor) -> None:
        """Let the views show the sums of this rank's part, and `others` (0-d) elsewhere."""
        assert self.shard is not None
        size = self.shard.numel()
        for view in self._views.values():  # and nothing between: that is zero for good
            view.copy_(others)
        self.flat[rank * size : (rank + 1) * size].copy_(self.shard)

    def give_back(self, index: int) -> None:
        """Let `p.grad` be the sum over the ranks, in the parameter's dtype."""
        parameter, view = self._parameters[index], self._views[index]
        same = view.dtype == parameter.dtype
        self._let_be(parameter, view if same else view.to(parameter.dtype))

    def forget(self, index: int) -> None:
        """Let `p.grad` be None."""
        self._let_be(self._parameters[index], None)

    def leave(self) -> None:
        """Let each `p.grad` that is a view be a tensor of its own."""
        for index in self.indices:
            parameter = self._parameters[index]
            if self.holds(index):
                self._let_be(parameter, self._views[index].to(parameter.dtype, copy=True))
            elif parameter.grad is None:  # the next one is of the parameter's dtype again
                self._let_be(parameter, None)

    def keep_from_reuse(self) -> None:
        """Keep the memory, once freed, from others until the current stream has read it."""
        self.backend.record_stream(self.flat, self.backend.current_stream(self.device))

    @staticmethod
    def _let_be(parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Set `p.grad`, also to a dtype that is not the parameter's."""
        holder: Any = parameter  # `grad_dtype` is not in torch's stubs
        dtype = parameter.dtype if grad is None else grad.dtype
        if holder.grad_dtype != dtype:
            parameter.grad = None
            holder.grad_dtype = dtype
        parameter.grad = grad


def view_of(flat: Tensor, slot: Slot, parameter: Tensor) -> Tensor:
    """A parameter's slot in a flat tensor: of its shape, and of its strides if it has no gaps."""
    part = flat[slot.begin : slot.begin + slot.numel]
    if Layout.of(parameter).is_dense:
        return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
    return part.view(parameter.shape)
