"""The buckets of a model chunk: made, and made anew when their order is learnt.

[Note: gradients in several parts]
Autograd adds up what a parameter gets, however often it is used, and tells once. A backward within
a backward tells by itself, so a parameter that is used in several checkpointed segments has several
complete gradients. How many there are is learnt in the first round, where a part that comes when
its bucket has left is sent behind it; the tally tells the ranks that there is one. From then on a
bucket waits for all parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ascend_core.errors import ConfigError
from ascend_ddp._bucket import Bucket
from ascend_ddp._fillers import Fillers
from ascend_ddp._parameters import Parameters
from ascend_ddp._plan import Size, plan_buckets
from ascend_ddp._ranks import Ranks
from ascend_ddp._tally import TallyResult
from ascend_ddp.config import DDPConfig

__all__ = ["Buckets"]

_NAMES_SHOWN = 4


class Buckets:
    """A sequence, in the order in which they leave.

    Args:
        parameters: Of the chunk; those that require no gradient take part as soon as they do.
        config: The options.
        ranks: That hold the same model. Compares their plans.

    Attributes:
        number_of: The bucket of each parameter.
        parts: In how many parts the gradient of each comes; empty before the first round.
        is_fixed: Whether the plan stays, whatever the order: an optimizer is sharded along it.
        fillers: The streams on which gradients come.
        device: On which ranks talk.

    Raises:
        ConfigError: When ranks have different plans.
        CommunicationError: When a rank does not answer.
    """

    def __init__(self, parameters: Parameters, config: DDPConfig, ranks: Ranks) -> None:
        self.number_of: dict[int, int] = {}
        self.parts: dict[int, int] = {}
        self.is_fixed = False
        self.device = parameters[0].device
        self._parameters = parameters
        self._config = config
        self._ranks = ranks
        self._dtype: torch.dtype | None = None
        if config.reduce_dtype is not None:
            self._dtype = getattr(torch, config.reduce_dtype)
        # In the order of the parameters, so that ranks with other devices count them alike.
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        self._places = {device: f"{device.type} {n}" for n, device in enumerate(devices)}
        self.fillers = Fillers(devices)
        self._order: list[int] = []
        self._all: list[Bucket] = []
        self._make()

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Bucket:
        return self._all[number]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._all)

    def _make(self, unsent: Collection[int] = ()) -> None:
        """Make buckets for the parameters that require gradients now, in the known order."""
        for bucket in self._all:
            bucket.leave()
            bucket.keep_from_reuse()
        parameters, config = self._parameters, self._config
        sizes = {i: self._size(i) for i in self._wanted(unsent)}
        plans = plan_buckets(sizes, self._order, config.bucket_bytes, self._ranks.size)
        mine = repr((sorted(sizes.items()), plans, config))
        self._ranks.compare(mine, self.device, f"{len(sizes)} parameters")
        self._all = []  # before new ones take memory
        ranks = self._ranks.size if config.mode == "reduce-scatter" else 0
        self._all = [Bucket(plan, parameters, self._dtype, ranks) for plan in plans]
        self.number_of = {i: n for n, bucket in enumerate(self._all) for i in bucket.indices}
        for bucket in self._all:
            for index in bucket.indices:
                bucket.fold(index)
        self.fillers.let_wait_for_plan()

    def _size(self, index: int) -> Size:
        parameter = self._parameters[index]
        dtype = self._dtype or parameter.dtype
        kind = (str(dtype), self._places[parameter.device])
        if self._config.mode == "reduce-scatter":  # its weights will lie in one buffer too
            kind = (f"{dtype} of {parameter.dtype}", self._places[parameter.device])
        return Size(self._parameters.names[index], parameter.numel(), dtype.itemsize, kind)

    def _wanted(self, unsent: Collection[int]) -> list[int]:
        """Those that take part: also a parameter that was frozen behind a gradient not yet sent."""
        return [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad or (index in unsent and parameter.grad is not None)
        ]

    def renew(self, unsent: Collection[int]) -> None:
        """Make them anew, where other parameters require gradients than did, or of other dtypes.

        Args:
            unsent: Parameters with gradients that were accumulated only.

        Raises:
            ConfigError: When the plan is fixed, or ranks have different plans.
        """
        wanted = set(self._wanted(unsent))
        if wanted == self.number_of.keys() and (self.is_fixed or not self._are_others()):
            return
        if self.is_fixed:
            changed = self.named(sorted(wanted ^ self.number_of.keys()))
            raise ConfigError(
                f"{changed} was frozen or unfrozen after the optimizer was sharded.",
                why="each rank keeps the state of its part of the buckets, and those would be "
                "others.",
                instead="freeze before shard_optimizer(); or remove() the sharded optimizer, "
                "freeze, and shard again.",
            )
        self._make(unsent)

    def _are_others(self) -> bool:
        """Whether parameters have other dtypes than when buckets were made."""
        return self._dtype is None and any(
            bucket.flat.dtype != self._parameters[index].dtype
            for bucket in self._all
            for index in bucket.indices
        )

    def learn(self, result: TallyResult, order: Sequence[int]) -> None:
        """Take what a round has told: the parts, and the order, which is that of the first rank."""
        self.parts = {i: n for i, n in enumerate(result.arrivals) if n > 0}
        if result.new_order and not self.is_fixed:
            self._order = self._ranks.from_first(order, len(self._parameters), self.device)
            self._make()

    def is_new(self, order: Sequence[int], before: Sequence[int]) -> bool:
        """Whether buckets would be others if gradients came in this order, as they did before."""
        if not order or self.is_fixed:
            return False
        planned = [index for bucket in self._all for index in bucket.indices]
        again = not self.parts or list(order) == before
        return again and list(order) != planned

    def await_all(self) -> None:
        """Let each miss the gradients of all of its parameters."""
        for bucket in self._all:
            bucket.await_all()

    def held_by(self, number: int) -> str:
        """What a bucket holds, for errors."""
        return f"the gradients of {self.named(self._all[number].indices)}"

    def named(self, indices: Sequence[int]) -> str:
        """Some parameters, for errors."""
        names = ", ".join(self._parameters.names[index] for index in indices[:_NAMES_SHOWN])
        left = len(indices) - _NAMES_SHOWN
        return f"{names} and {left} more" if left > 0 else names

    def forget(self) -> None:
        """Let each `p.grad` be None, and wait for nothing that travels."""
        for bucket in self._all:
            bucket.work = None
            for index in bucket.indices:
                bucket.forget(index)

    def leave(self) -> None:
        """Let each `p.grad` be a tensor of its own, and hold none."""
        for bucket in self._all:
            bucket.leave()
        self._all = []
