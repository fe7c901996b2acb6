"""What is on its way between device and host, for one model: who goes, who comes, and when.

[Note: what the host decides, and when]
The host runs ahead of the device: it may be two layers on while the device computes the first. So
nothing is decided by whether a copy has ended, and the host waits for nothing. Copies are queued
in the order in which the device will need them; `Transfer` makes each wait for what it must.

Backward *reaches* a pass when it first asks for one of its tensors. Then all of the pass is
fetched, unless it is there, and behind it the passes that are expected next, as many as `prefetch`
says. What was brought for a pass that is neither the one reached nor expected any more is dropped:
it came in vain, or may be wanted by another backward through the same graph, from the host.

What the device took is read from events with times when they have come to their end, and used in
later passes only.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch

from ascend_core.streams import Event
from ascend_core.transfer import DeviceCopy, Transfer
from ascend_swap._order import BackwardOrder
from ascend_swap._passes import LayerPass, Tally

__all__ = ["Counts", "Traffic"]

_OFTEN = 2  # times in a row that a layer is late before it stays
_TRIED = 100  # passes after which a layer that stays is moved again, to see
_UNREAD = 4096  # waits whose times were not read yet, at most


class Counts:
    """What was counted since the feature was turned on.

    Attributes:
        hits: Moved storages that were on their way when backward reached their pass.
        misses: Those that were not.
        waits: How often the device waited for a copy that had not ended.
        waited_ms: How long, in milliseconds.
        in_vain_bytes: Bytes that were copied to the host, and that somebody else held on the
            device until backward came.
        over_budget_bytes: Bytes that stayed on the device since the host had no room.
    """

    def __init__(self) -> None:
        self.hits = self.misses = self.waits = 0
        self.waited_ms = 0.0
        self.in_vain_bytes = self.over_budget_bytes = 0


class _Wait(NamedTuple):
    """A stream that comes to need a copy.

    Attributes:
        needed: When the device came there.
        done: When the copy had ended.
        leaves: The layer whose tensors the copy takes to the host, and the bytes of its largest
            storage; None for a copy back.
    """

    needed: Event
    done: Event
    leaves: tuple[int, int] | None

    @property
    def is_over(self) -> bool:
        """Whether both times are known."""
        return self.needed.query() and self.done.query()

    @property
    def milliseconds(self) -> float:
        """How long the copy took beyond the need."""
        return max(0.0, self.needed.elapsed_time(self.done))


class _Late(NamedTuple):
    """A layer that backward needed before it had left.

    Attributes:
        times: How often in a row.
        nbytes: The largest storage that it saved, when that was smallest; a larger one may have
            more time to leave, and is more worth it.
        stayed: How many of its passes have stayed since.
    """

    times: int
    nbytes: int
    stayed: int = 0


class Traffic:
    """The passes of a model that are alive, and what is expected of them.

    Args:
        layers: How many layers there are.
        prefetch: How many passes to fetch ahead of the one that backward is in.
        keep_last: How many of the last layers stay on the device; None to find out.

    Attributes:
        lock: To be held around every call but `begin` and `read_times`.
        counts: See there.
        latest: What the latest pass of each layer saved.
    """

    def __init__(self, layers: int, prefetch: int, keep_last: int | None) -> None:
        self.lock = threading.RLock()
        self.counts = Counts()
        self.latest: dict[int, Tally] = {}
        self._layers = layers
        self._prefetch = prefetch
        self._keep_last = keep_last
        self._order = BackwardOrder()
        self._passes: weakref.WeakValueDictionary[int, LayerPass] = weakref.WeakValueDictionary()
        self._fetched: weakref.WeakSet[LayerPass] = weakref.WeakSet()
        self._late: dict[int, _Late] = {}
        self._waits: deque[_Wait] = deque(maxlen=_UNREAD)

    def begin(self, layer: int) -> LayerPass:
        """A layer is called. Fetches what backward is expected to need next, if that is known."""
        self.read_times()
        with self.lock:
            number = self._order.begin(layer)
            begun = LayerPass(self, layer, number, keeps=self._keeps(layer))
            self._passes[number] = begun
            self.latest[layer] = begun.tally
            weakref.finalize(begun, self._order.end, number).atexit = False
            self._fetch_expected()
            return begun

    def reached(self, asked: LayerPass) -> None:
        """Backward asks for a tensor of a pass."""
        task = torch._C._current_graph_task_id()
        self._fetched.add(asked)
        if task in (-1, asked.task):  # -1: somebody looks at what a node has saved
            return
        asked.task = task
        self._order.reach(asked.number)
        self._count(asked)
        if asked.left is not None:
            self._note(*asked.left, leaves=(asked.layer, asked.largest))
        _fetch(asked)
        self._fetch_expected(asked)

    def waits_for(self, copy: DeviceCopy, engine: Transfer) -> None:
        """The current stream is about to wait for a copy back."""
        self._note(copy.done, engine)

    def read_times(self) -> None:
        """Count the waits whose ends have come. Does not block the host."""
        with self.lock:
            while self._waits and self._waits[0].is_over:
                wait = self._waits.popleft()
                late = wait.milliseconds
                if wait.leaves is not None:
                    self._note_leaving(*wait.leaves, late=late > 0)
                elif late:
                    self.counts.waits += 1
                    self.counts.waited_ms += late

    def _keeps(self, layer: int) -> float:
        if self._keep_last is not None:
            return math.inf if layer >= self._layers - self._keep_last else 0
        if self._order.turns_around():
            return math.inf
        late = self._late.get(layer)
        if late is None or late.times < _OFTEN:
            return 0
        if late.stayed == _TRIED:  # it may have been a moment's trouble: it moves, and is measured
            self._late[layer] = late._replace(times=_OFTEN - 1, stayed=0)
            return 0
        self._late[layer] = late._replace(stayed=late.stayed + 1)
        return late.nbytes

    def _note_leaving(self, layer: int, nbytes: int, *, late: bool) -> None:
        before = self._late.pop(layer, _Late(0, nbytes))
        if late:
            self._late[layer] = _Late(before.times + 1, min(before.nbytes, nbytes))

    def _count(self, asked: LayerPass) -> None:
        for moved in asked.moved():
            if moved.storage is not None:
                self.counts.in_vain_bytes += moved.nbytes
            elif moved.is_fetched:
                self.counts.hits += 1
            else:
                self.counts.misses += 1

    def _note(self, done: Event, engine: Transfer, leaves: tuple[int, int] | None = None) -> None:
        self._waits.append(_Wait(engine.mark(), done, leaves))

    def _fetch_expected(self, asked: LayerPass | None = None) -> None:
        numbers = self._order.expected(self._prefetch)
        expected = [one for one in map(self._passes.get, numbers) if one is not None]
        self._drop_all_but([*expected, *([] if asked is None else [asked])])
        for one in expected:
            _fetch(one)
            self._fetched.add(one)

    def _drop_all_but(self, wanted: list[LayerPass]) -> None:
        needed = {id(moved) for one in wanted for moved in one.moved()}
        for fetched in self._fetched.difference(wanted):
            self._fetched.discard(fetched)
            for moved in fetched.moved():
                if id(moved) not in needed:
                    moved.drop()


def _fetch(one: LayerPass) -> None:
    try:
        for moved in one.moved():
            if moved.storage is None:
                moved.fetch()
    except torch.OutOfMemoryError:
        return  # it is asked for again when backward needs it, and by then there may be room
