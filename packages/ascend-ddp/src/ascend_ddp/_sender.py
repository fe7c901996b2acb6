"""What sends the buckets of a model chunk, in their order, and waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ascend_ddp._buckets import Buckets
from ascend_ddp._ranks import Ranks
from ascend_ddp._round import Round
from ascend_ddp._tally import Tally

__all__ = ["Sender"]


class Sender:
    """Sends what a round has filled. Every failure names this rank and what it waited for.

    Args:
        buckets: Of the chunk.
        ranks: To which they go.
        average: Whether sums are divided by the number of ranks.

    Attributes:
        collectives: How often buckets were sent, so far.
        factor: By which gradients are multiplied before they are added up.
    """

    def __init__(self, buckets: Buckets, ranks: Ranks, *, average: bool) -> None:
        self.collectives = 0
        self._buckets = buckets
        self._ranks = ranks
        self.factor = 1 / ranks.size if average else 1.0
        self._identity = ranks.agree_on_number(buckets.device)

    @property
    def sent(self) -> tuple[str, str]:
        """What a backward has sent, and what that holds, for errors of the tally.

        It is behind the buckets, or beside them: that it does not come may be due to any of them.
        """
        last = len(self._buckets) - 1
        return f"buckets 0 to {last} and the tally of gradients", self._buckets.held_by(0)

    def launch_full(self, running: Round) -> None:
        """Send the buckets that are full and have none before them that is not."""
        while running.launched < len(self._buckets):
            if self._buckets[running.launched].missing > 0:
                return
            self._launch(running)

    def launch_rest(self, running: Round) -> None:
        """Send the buckets that were not, as they are."""
        while running.launched < len(self._buckets):
            self._launch(running)

    def _launch(self, running: Round) -> None:
        """Send the next bucket."""
        number = running.launched
        bucket = self._buckets[number]
        self._buckets.fillers.wait(running, number, bucket)
        running.held.update(zip(bucket.indices, bucket.let_go(self.factor), strict=True))
        running.events.append(("launch", number))
        self._send(number)
        running.launched += 1

    def launch_nothing(self, failed: Round) -> None:
        """Send zeros for the buckets that a backward which has failed did not come to."""
        for number in range(failed.launched, len(self._buckets)):
            bucket = self._buckets[number]
            # Autograd has not let the streams wait, as it ended early.
            self._buckets.fillers.wait(failed, number, bucket)
            bucket.leave()  # what it holds, or what has arrived since, stays where it is found
            bucket.flat.zero_()
            self._send(number)

    def _send(self, number: int) -> None:
        bucket = self._buckets[number]
        with self._ranks.named(f"bucket {number}", self._buckets.held_by(number)):
            if bucket.shard is None:
                bucket.work = self._ranks.all_reduce(bucket.flat)
            else:
                bucket.work = self._ranks.reduce_scatter(bucket.shard, bucket.flat)
        self.collectives += 1

    def tally(
        self, used: Sequence[bool], arrivals: Sequence[int], new_order: bool, *, failed: bool
    ) -> Tally:
        """Send the tally, and wait until it and all buckets have arrived."""
        with self._ranks.named(*self.sent):
            device, ranks = self._ranks.nearest(self._buckets.device), self._ranks
            tally = Tally(used, arrivals, new_order, failed, self._identity, device, ranks)
        for number, bucket in enumerate(self._buckets):
            work, bucket.work = bucket.work, None
            if work is not None:
                self._ranks.wait(work, f"bucket {number}", self._buckets.held_by(number))
        self._ranks.wait(tally.work, *self.sent)
        tally.arrived()
        return tally

    def late(self, index: int, grad: Tensor | None, name: str) -> Tensor:
        """Sum what came of a parameter's gradient behind its bucket, as that is summed."""
        view = self._buckets[self._buckets.number_of[index]].view(index)
        part = torch.zeros_like(view) if grad is None else grad.detach().to(view.dtype)
        part.mul_(self.factor)
        what, names = "what came behind a bucket", f"a part of {name}"
        with self._ranks.named(what, names):
            work = self._ranks.all_reduce(part)
        self._ranks.wait(work, what, names)
        return part
