"""What ranks tell one another about a backward: which parameters had a gradient, and how often.

One small collective for each backward, behind those of the buckets. Where the hosts of a group can
talk, they do: at the end of a backward each waits until the others have come there, and for no
device. Where devices alone talk, the result is on the host when the next backward begins, without
a wait of the host; who needs it earlier waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from ascend_core.device import backend_of
from ascend_ddp._ranks import Ranks

__all__ = ["Tally", "TallyResult"]


class TallyResult(NamedTuple):
    """What is true of any rank.

    Attributes:
        used: For each parameter whether a rank has a gradient for it.
        arrivals: In how many parts the gradient of each came, at most, in this backward.
        new_order: Whether the first rank saw gradients come in another order than was planned.
        failed: Whether an exception ended the backward of a rank, and not those of all.
        is_mixed: Whether ranks have reduced different models with one another.
    """

    used: list[bool]
    arrivals: list[int]
    new_order: bool
    failed: bool
    is_mixed: bool


class Tally:
    """The collective of one backward.

    Args:
        used: For each parameter whether this rank has a gradient for it.
        arrivals: In how many parts it came.
        new_order: Whether the order was another one; that of the first rank counts.
        failed: Whether an exception ended the backward here.
        identity: Of the model, the same on every rank; from 0, less than 2 ** 31.
        device: On which ranks talk.
        ranks: Who talks.

    Attributes:
        work: The collective, to be waited for.
    """

    def __init__(
        self,
        used: Sequence[bool],
        arrivals: Sequence[int],
        new_order: bool,
        failed: bool,
        identity: int,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        numbers = [1 + n if is_used else 0 for is_used, n in zip(used, arrivals, strict=True)]
        numbers += [new_order and ranks.number == 0, failed, not failed, identity, -identity]
        # From pageable memory, the host would wait for all that the stream has still to do.
        pinned = backend_of(device).can_pin
        told = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._sent = told.to(device, non_blocking=True)
        self.work = ranks.all_reduce(self._sent, distributed.ReduceOp.MAX)
        self._host: Tensor | None = None

    @property
    def is_near(self) -> bool:
        """Whether the host has the result as soon as it has arrived, and so need not wait."""
        return not backend_of(self._sent).can_pin

    def arrived(self) -> None:
        """Start the way to the host; the collective has been waited for."""
        backend = backend_of(self._sent)
        self._host = torch.empty_like(self._sent, device="cpu", pin_memory=backend.can_pin)
        self._host.copy_(self._sent, non_blocking=True)
        self._event = backend.new_event()
        self._event.record(backend.current_stream(self._sent.device))

    def result(self) -> TallyResult:
        """What came of it. Blocks the host until it is there."""
        assert self._host is not None
        self._event.synchronize()
        *numbers, new_order, failed, ended, highest, lowest = self._host.tolist()
        return TallyResult(
            [number > 0 for number in numbers],
            [max(0, number - 1) for number in numbers],
            bool(new_order),
            bool(failed and ended),
            highest != -lowest,
        )
