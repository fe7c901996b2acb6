"""One pair of saved-tensor hooks on one thread, and the keepers at work under it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ascend_core.layout import Layout
from ascend_core.saved._packed import Packed, PackedParameter, Passed, Saved
from ascend_core.saved._records import StorageRecord, StorageTable
from ascend_core.saved.keeper import Claim, Keeper, Session

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# Autograd calls it for each saved tensor: a function of ours would be one frame more.
_UNPACK: Callable[[Saved], Tensor] = operator.methodcaller("get")


class Frame:
    """A pushed pair of hooks: what it saw, and who decides.

    [Note: a frame over somebody else's hooks]
    A frame that is opened over a foreign pair (a user's own hooks, `save_on_cpu`, a non-reentrant
    checkpoint) hands it what no keeper claims. A checkpoint counts what it is offered in forward
    and again in its recomputation, and wants the same sequence. So a frame begins with an empty
    table, whatever frames are open further out: its decisions depend only on what happens inside
    it, and come out the same both times.

    Attributes:
        table: The storages that this frame has seen and that are still alive.
        serial: How many tensors were saved in this frame.
        latest: The record of the storage that was saved last.
        below: Somebody else's pair of hooks that this frame was opened over, or None.
    """

    def __init__(self, below: Hooks | None) -> None:
        self.table = StorageTable()
        self.serial = 0
        self.latest: StorageRecord | None = None
        self.below = below
        self._sessions: dict[Keeper, Session] = {}
        # Those that move nothing first, and of each kind the innermost region first; a keeper that
        # was entered twice stands once, where it stood.
        self._order: list[tuple[Keeper, Session]] = []
        self._entered: dict[Keeper, int] = {}

    @property
    def over_foreign(self) -> bool:
        """Whether somebody else's pair of hooks is below."""
        return self.below is not None

    def hooks(self) -> Hooks:
        """The pair to push.

        A frame does not hold it: a method of its own would be a cycle, and what is below (a
        checkpoint's closure, and so its inputs) would live until a collection.
        """
        return self._pack, _UNPACK

    def session(self, keeper: Keeper) -> Session:
        """The keeper's work in this frame, begun when it is first asked for."""
        session = self._sessions.get(keeper)
        if session is None:
            session = self._sessions[keeper] = keeper.open(self)
        return session

    def enter(self, keeper: Keeper) -> None:
        """Offer saved tensors to `keeper`, before those of the regions further out.

        Whoever moves tensors is asked last: what can be rebuilt need not be copied, nor held where
        it is by a keeper that has decided to move nothing now.
        """
        count = self._entered.get(keeper, 0)
        self._entered[keeper] = count + 1
        if count == 0:
            self._order.insert(0, (keeper, self.session(keeper)))
            self._order.sort(key=lambda pair: pair[0].moves)

    def leave(self, keeper: Keeper) -> None:
        """Undo one `enter`."""
        count = self._entered[keeper] - 1
        self._entered[keeper] = count
        if count == 0:
            self._order = [pair for pair in self._order if pair[0] is not keeper]

    def close(self) -> None:
        """End every session and forget what was seen."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self._order.clear()
        self.table.clear()
        self.below = None

    def _pack(self, tensor: Tensor) -> Saved:
        self.serial += 1
        if not Layout.fits(tensor):  # sparse, nested, a subclass: nothing that a keeper can judge
            return self._leave(tensor)
        record = self.table.track(tensor)
        claim = None if type(tensor) is nn.Parameter else self._claim(tensor, record)
        if claim is None:
            packed = self._leave(tensor)
        else:
            packed = Packed(tensor, self.serial, claim, checked=self.below is None)
        record.note(packed)
        self.latest = record
        return packed

    def _claim(self, tensor: Tensor, record: StorageRecord) -> Claim | None:
        for keeper, session in self._order:
            if keeper.moves and (self.over_foreign or backward_runs()):
                continue
            claim = session.claim(tensor, record)
            if claim is not None:
                return claim
        return None

    def _leave(self, tensor: Tensor) -> Saved:
        """Leave a tensor that nobody claims to the pair below, or where it is."""
        if self.below is not None:
            pack, unpack = self.below
            return Passed(tensor, self.serial, pack(tensor), unpack)
        if type(tensor) is nn.Parameter:
            return PackedParameter(tensor, self.serial)
        return Packed(tensor, self.serial)


def backward_runs() -> bool:
    """Whether this thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1
