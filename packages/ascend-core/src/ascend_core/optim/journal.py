"""What of a step has been done, so that one that was interrupted can be finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ascend_core.errors import AscendError, ConfigError, OptimizerFailedError
from ascend_core.optim.home import CohortWindow, Slot, Walk

__all__ = ["Journal"]


class Journal:
    """One step.

    Args:
        windows: What the step is to walk.
        tokens: For each slot that has a gradient what tells it from another one.

    Attributes:
        is_writing: Whether something was written since the step was last begun.
        is_computing_in_place: Whether arithmetic on the state itself is under way.
        failure: What is to be said from now on, once a step failed half-way.
        walk: Kept where a commit was interrupted; it owns what is still to be written.
    """

    def __init__(self, windows: Sequence[CohortWindow], tokens: Mapping[Slot, object]) -> None:
        self._windows = windows
        self._tokens = tokens
        self._finished: set[CohortWindow] = set()
        self._commit: Callable[[], None] | None = None
        self.is_writing = False
        self.is_computing_in_place = False
        self.failure: OptimizerFailedError | None = None
        self.walk: Walk | None = None

    @property
    def is_open(self) -> bool:
        """Whether a window has been written and another one has not."""
        return self._commit is not None or bool(self._finished and self.remaining())

    @property
    def has_commit(self) -> bool:
        """Whether a commit was begun and did not end."""
        return self._commit is not None

    @property
    def slots(self) -> set[Slot]:
        """The slots that the step is for."""
        return set(self._tokens)

    def remaining(self) -> list[CohortWindow]:
        """The windows that are not finished."""
        return [window for window in self._windows if window not in self._finished]

    def commit(self, write: Callable[[], None]) -> None:
        """Write what a window computed, in a way that can be repeated."""
        self._commit = write
        write()

    def finish(self, window: CohortWindow) -> None:
        """Note that a window is done."""
        self._finished.add(window)
        self._commit = None

    def repeat_commit(self) -> None:
        """Write again what was being written when the last attempt was interrupted."""
        if self._commit is None:
            return
        self.is_writing = True
        self._commit()
        self.is_writing = False
        self.finish(self.remaining()[0])
        self.abandon()

    def abandon(self) -> None:
        """Give back what was kept for a commit that is to be repeated."""
        self._commit = None
        if self.walk is not None:
            self.walk.close()
            self.walk = None

    def check_same(self, token: Callable[[Slot], object]) -> None:
        """Refuse to finish a step with other gradients than those it was begun with.

        Raises:
            ConfigError: When a gradient that is still needed is another one.
        """
        left = {window.slot(piece) for window in self.remaining() for piece in window.slices}
        for slot in left & self.slots:
            if token(slot) != self._tokens[slot]:
                raise ConfigError(
                    f"the interrupted step cannot be finished: the gradient of {slot.name} is "
                    "another one.",
                    why=f"{len(self._finished)} of {len(self._windows)} windows were stepped "
                    "before the interruption, with the gradients of then.",
                    instead="call step() again before backward or zero_grad, or load the last "
                    "checkpoint with load_state_dict.",
                )

    def is_damaged_by(self, error: BaseException) -> bool:
        """Whether what an exception left behind is not known.

        A `RuntimeError` is how torch reports a failed kernel or copy. When the allocator had no
        memory, or the exception came from elsewhere, no more was written than the journal says,
        unless it came in the middle of arithmetic on the state itself.
        """
        if self.is_computing_in_place:
            return True
        is_torchs = isinstance(error, RuntimeError) and not isinstance(
            error, (torch.OutOfMemoryError, AscendError)
        )
        return self.is_writing and is_torchs


def failed_because(error: BaseException) -> OptimizerFailedError:
    """Make the error of an optimizer whose step failed half-way."""
    first = str(error).partition("\n")[0]
    return OptimizerFailedError(
        "the optimizer failed in the middle of a step.",
        why="what the step wrote is not known, so weights and state are not to be trusted; "
        f"it was {type(error).__name__}: {first}",
        instead="load the last checkpoint, weights and optimizer, and go on from there.",
    )
