"""The sums that a round has left, until a sharded optimizer has used them."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from ascend_core.errors import ConfigError
from ascend_ddp._buckets import Buckets
from ascend_ddp._parameters import Parameters

__all__ = ["Sums"]


class Sums:
    """Which gradients there are, and whether they lie in shards.

    Args:
        parameters: Of the chunk.

    Attributes:
        used: For each parameter whether a rank had a gradient, in the last round that sent.
        are_held: Whether they lie in shards, for a sharded optimizer to use.
        are_shown: Whether they are to be seen in `p.grad`, and gone when that is another one.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.used = [False] * len(parameters)
        self.are_held = False
        self.are_shown = False
        self._parameters = parameters
        self._shown: dict[int, Tensor | None] = {}  # what was put into `p.grad`

    def refuse_held(self) -> None:
        """Refuse to write over sums that no step has used.

        Raises:
            ConfigError: When they are still wanted.
        """
        if not self.are_held:
            return
        if self.are_shown and not any(
            self._parameters[index].grad is grad for index, grad in self._shown.items()
        ):
            self.are_held = False
            return
        raise ConfigError(
            "a backward began while the gradients of the one before were not yet used.",
            why="they were scattered over the ranks, and cannot be added to any more.",
            instead="call step() or zero_grad() of the sharded optimizer first (zero_grad() of the "
            "model does not reach them); to add up several backwards, run all but the last in "
            "no_sync().",
        )

    def show(self, buckets: Buckets, group: distributed.ProcessGroup | None) -> None:
        """Show them in `p.grad`: this rank's part of them, and elsewhere a NaN or zeros.

        A NaN where one rank has an inf or a NaN: a gradient scaler finds one on every rank or on
        none.

        Args:
            buckets: In whose shards they lie.
            group: Of the ranks.
        """
        others = torch.zeros((), dtype=torch.float32, device=buckets.device)
        for bucket in buckets:
            assert bucket.shard is not None
            others += (bucket.shard * 0).sum(dtype=torch.float32)  # inf * 0 is NaN
        distributed.all_reduce(others, group=group)
        self._shown = {}
        for bucket in buckets:
            bucket.show(distributed.get_rank(group), others)
            for index in bucket.indices:
                if self.used[index]:
                    bucket.give_back(index)
                    self._shown[index] = self._parameters[index].grad
