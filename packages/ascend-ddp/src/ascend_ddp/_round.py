"""One backward, as the reducer sees it."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import Counter, defaultdict

from ascend_core.streams import Stream
from ascend_ddp._backward import End

__all__ = ["Round"]

_LONGEST_S = 0.2


@dataclasses.dataclass
class Round:
    """What has come of a backward so far.

    Attributes:
        syncs: Whether gradients travel, or are accumulated only.
        end: The `End` that autograd holds; dead when the backward has failed.
        is_behind: Whether the `End` was reached within another backward, which goes on.
        task: Autograd's number of the backward, where it is known.
        arrivals: In how many parts the gradient of each parameter came so far.
        order: Parameters in the order in which their gradients were complete.
        launched: How many buckets travel.
        held: For each parameter in those, whether it has a gradient here.
        late: Parameters whose gradients came in parts of which one was behind its bucket.
        filled_on: For each bucket the streams on which its gradients were accumulated.
        events: What happened, in order: ("gradient", parameter) and ("launch", bucket).
    """

    syncs: bool
    end: weakref.ref[End] | None = None
    is_behind: bool = False
    task: int | None = None
    arrivals: Counter[int] = dataclasses.field(default_factory=Counter)
    order: list[int] = dataclasses.field(default_factory=list)
    launched: int = 0
    held: dict[int, bool] = dataclasses.field(default_factory=dict)
    late: set[int] = dataclasses.field(default_factory=set)
    filled_on: dict[int, list[Stream]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    events: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    @property
    def has_end(self) -> bool:
        """Whether autograd will tell when the backward has ended."""
        return self.end is not None and self.end() is not None

    def is_of(self, task: int) -> bool:
        """Whether it is the round of autograd's backward of that number, which goes on."""
        end = self.end  # and not `has_end`: every gradient asks
        return self.task == task and not self.is_behind and end is not None and end() is not None

    def has_failed(self, task: int | None) -> bool:
        """Whether an exception ended the backward.

        Args:
            task: Autograd's number of the backward that now runs: -1 where none does, None where
                it runs within another one.
        """
        if self.end is None or self.is_behind:
            return False
        is_another = task is not None and self.task is not None and task != self.task
        if is_another:
            self._let_end_die()
        return not self.has_end or task == -1

    def _let_end_die(self) -> None:
        """Let a thread of autograd drop what has failed; it needs Python's lock for that."""
        latest = time.monotonic() + _LONGEST_S
        while self.has_end and time.monotonic() < latest:
            time.sleep(0.001)
