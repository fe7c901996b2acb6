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
        is_computing_in_place: Whether arithmetic on the state itself is under way, or done and not
            committed.
        failure: What is to be said from now on, once a step failed half-way.
        walk: Of the attempt under way, or of one that was interrupted; it owns the device memory,
            and what of a commit is still to be written.
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
    def is_begun(self) -> bool:
        """Whether a window has been written."""
        return self._commit is not None or bool(self._finished)

    @property
    def is_complete(self) -> bool:
        """Whether every window has been written."""
        return self._commit is None and bool(self._finished) and not self.remaining()

    @property
    def finished(self) -> list[CohortWindow]:
        """The windows that are done, in their order."""
        return [window for window in self._windows if window in self._finished]

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
        self.is_computing_in_place = False
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

    def abandon(self) -> None:
        """Give up what was to be repeated, and its memory."""
        self._commit = None
        self.close()

    def close(self) -> None:
        """Give back the device memory of an attempt. A second call does nothing."""
        if self.walk is not None:
            self.walk.close()
            self.walk = None

    def has_same(self, token: Callable[[Slot], object]) -> bool:
        """Whether all gradients that are still there are those that the step was begun with."""
        return all(token(slot) in (None, known) for slot, known in self._tokens.items())

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
        return self.is_writing and is_torchs(error)


def is_torchs(error: BaseException) -> bool:
    """Whether it is how torch reports a kernel or copy that failed."""
    return isinstance(error, RuntimeError) and not isinstance(
        error, (torch.OutOfMemoryError, AscendError)
    )


def failed_because(error: BaseException) -> OptimizerFailedError:
    """Make the error of an optimizer whose step failed half-way."""
    first = str(error).partition("\n")[0]
    return OptimizerFailedError(
        "the optimizer failed in the middle of a step.",
        why="what the step wrote is not known, so weights and state are not to be trusted; "
        f"it was {type(error).__name__}: {first}",
        instead="load the last checkpoint, weights and optimizer, and go on from there; in a new "
        "process where the device raises as well.",
    )
