"""Reduces the gradients of one model chunk while its backward runs.

[Note: a round]
A round is one backward. It begins with the first gradient that is complete and ends with the
callback that autograd calls behind a backward. In between every gradient makes its bucket fuller,
and full buckets leave, always in the order of the plan, so that all ranks send the same. At the end
the buckets that are not full leave as they are: where a parameter has no gradient, with zeros.

A backward may run inside another one (reentrant checkpointing), and a callback that is asked for
inside is called at the end of the inner one. So it is asked for when backward reaches the chunk's
output, outside. Where the chunk was not called as a whole, the end of an inner one is known by the
Python frames above, and the callback is asked for again by the next gradient. If none comes any
more, the round is ended by whatever needs it: the next backward, `wait()`, or an optimizer's step.

An exception in a backward leaves a callback that died uncalled, by which the next round knows. It
dies a moment after the exception is raised, where a thread of autograd still has it. So the next
backward, which autograd gives another number, waits for its death; and what comes when no backward
runs need not ask.

[Note: gradients in several parts]
Autograd adds up what a parameter gets, however often it is used, and tells once. A backward within
a backward tells by itself, so a parameter that is used in several checkpointed segments has several
complete gradients. How many there are is learnt in the first round, where a part that comes when
its bucket has left is sent behind it; the tally tells the ranks that there is one. From then on a
bucket waits for all parts.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ascend_core.device import backend_of
from ascend_core.errors import CommunicationError, ConfigError
from ascend_core.streams import Stream
from ascend_ddp._bucket import Bucket
from ascend_ddp._called import Called
from ascend_ddp._parameters import Parameters
from ascend_ddp._plan import Size, digest, plan_buckets
from ascend_ddp._ranks import Ranks
from ascend_ddp._round import End, Round
from ascend_ddp._tally import Tally, TallyResult
from ascend_ddp.config import DDPConfig

__all__ = ["Reducer"]

_NAMES_SHOWN = 4


class Reducer:
    """The buckets of a model chunk, and the hooks that fill them.

    Args:
        chunk: The module; its parameters that require no gradient take part as soon as they do.
        config: The options.
        group: Of the ranks that hold the same model.

    Attributes:
        is_last_microbatch: Whether the next backward sends what was accumulated.
        buckets: In the order in which they leave.
        last: What happened in the last round that sent.
        collectives: How often buckets were sent, so far.
        rounds: How many backwards have sent, so far.
        is_fixed: Whether the plan stays, whatever the order: an optimizer is sharded along it.
        chunk: The module, while it lives.
        parameters: Of the chunk, in the order of their indices.
        names: Theirs.
        used: For each parameter whether a rank had a gradient, in the last round that sent.
        holds_sums: Whether sums of the last round lie in shards, for a sharded optimizer to use.
        shows_sums: Whether they are to be seen in `p.grad`, and gone when that is another one.
        shown: What was put there, by index.
        after_round: Is called when the sums of a round have arrived.
        refusal: Makes the error that a round ends with before it sends anything: a rank whose
            step has failed has left the sequence of collectives that the others are in.
    """

    def __init__(
        self,
        chunk: nn.Module,
        config: DDPConfig,
        group: distributed.ProcessGroup | None,
    ) -> None:
        self.is_last_microbatch = True
        self.buckets: list[Bucket] = []
        self.last = Round(syncs=True)
        self.collectives = 0
        self.rounds = 0
        self.is_fixed = False
        self.chunk = weakref.ref(chunk)
        self.parameters = Parameters(dict(chunk.named_parameters()))
        self.names = self.parameters.names
        self.used = [False] * len(self.parameters)
        self.holds_sums = False
        self.shows_sums = False
        self.shown: dict[int, Tensor | None] = {}
        self.after_round: Callable[[Reducer], None] | None = None
        self.refusal: Callable[[], Exception] | None = None
        self._device = self.parameters[0].device  # on which ranks talk
        self._config = config
        self._ranks = Ranks(group, config.timeout_s)
        self._dtype: torch.dtype | None = None
        if config.reduce_dtype is not None:
            self._dtype = getattr(torch, config.reduce_dtype)
        self._lock = threading.RLock()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._round: Round | None = None
        self._end: weakref.ref[End] | None = None  # of the backward that reached the output
        self._end_task: int | None = None
        self._tally: Tally | None = None
        self._expected: dict[int, int] = {}  # parts of each gradient; unknown before a round
        self._order: list[int] = []
        self._places = {device: f"{device.type} {n}" for n, device in enumerate(self._devices())}
        self._fillers: dict[Any, Stream] = {}  # all streams on which gradients were accumulated
        self._planned_on: dict[torch.device, Stream] = {}
        self._plan()
        self._call = chunk.register_forward_hook(Called(self))

    @property
    def group(self) -> distributed.ProcessGroup | None:
        """Of the ranks that hold the same model; None for all."""
        return self._ranks.group

    # The plan

    def _plan(self) -> None:
        """Make buckets for the parameters that require gradients now, in the known order."""
        for bucket in self.buckets:
            bucket.leave()
            bucket.keep_from_reuse()
        sizes = {i: self._size(i) for i, p in enumerate(self.parameters) if p.requires_grad}
        config = self._config
        plans = plan_buckets(sizes, self._order, config.bucket_bytes, self._ranks.size)
        mine = digest(sizes, plans, repr(config))
        self._ranks.compare(mine, self._device, f"{len(sizes)} parameters")
        self.buckets = []  # before new ones take memory
        scatters = config.mode == "reduce-scatter"
        ranks = self._ranks.size if scatters else 0
        self.buckets = [Bucket(plan, self.parameters, self._dtype, ranks) for plan in plans]
        self._bucket_of = {i: n for n, b in enumerate(self.buckets) for i in b.indices}
        for bucket in self.buckets:
            for index in bucket.indices:
                bucket.fold(index)
                self._watch(index)
        self._order_fillers()

    def _order_fillers(self) -> None:
        """Let no stream fill a bucket before the current one has made it."""
        self._planned_on = {d: backend_of(d).current_stream(d) for d in self._places}
        for stream in self._fillers.values():
            _let_wait(stream, self._planned_on[stream.device])

    def _size(self, index: int) -> Size:
        parameter = self.parameters[index]
        dtype = self._dtype or parameter.dtype
        kind = (str(dtype), self._places[parameter.device])
        if self._config.mode == "reduce-scatter":  # its weights will lie in one buffer too
            kind = (f"{dtype} of {parameter.dtype}", self._places[parameter.device])
        return Size(self.names[index], parameter.numel(), dtype.itemsize, kind)

    def _devices(self) -> list[torch.device]:
        """In the order of the parameters, so that ranks with other devices count them alike."""
        return list(dict.fromkeys(parameter.device for parameter in self.parameters))

    def _watch(self, index: int) -> None:
        if index in self._hooks:
            return

        def arrived(parameter: Tensor) -> None:
            self._arrived(index)

        arrived.reduces = True  # type: ignore[attr-defined]
        self._hooks[index] = self.parameters[index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            arrived
        )

    # A round

    def called(self, output: Any) -> None:
        """The chunk was called: a backward may come."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, grad: Tensor) -> None:
        """Backward, or autograd.grad, has come to the chunk's output: be told when it has ended."""
        with self._lock:
            task = _task()
            # The end of a backward that has failed may live on for a moment, in another thread.
            is_another = task is not None and task != self._end_task
            if self.buckets and (_gone(self._end) or is_another):
                self._end, self._end_task = self._ask_for_end(), task

    def _ask_for_end(self) -> weakref.ref[End]:
        end = End(self._ended)
        Variable._execution_engine.queue_callback(end)
        return weakref.ref(end)

    def _arrived(self, index: int) -> None:
        """A gradient, or a part of one, was accumulated."""
        with self._lock:
            running = self._running()
            running.arrivals[index] += 1
            running.events.append(("gradient", index))
            number = self._bucket_of[index]
            bucket = self.buckets[number]
            if running.syncs and number < running.launched:
                running.late.add(index)
                return
            self._refuse_sparse(index)
            self._note_filler(running, number)
            bucket.fold(index)
            if running.arrivals[index] == self._expected.get(index, 1):
                running.order.append(index)
                bucket.missing -= 1
            if running.syncs and self._config.overlap:
                self._launch_full(running)

    def _note_filler(self, running: Round, number: int) -> None:
        """Remember for whom a bucket waits: what the current stream has accumulated."""
        flat = self.buckets[number].flat
        device = flat.device
        stream = backend_of(flat).current_stream(device)  # that of a tensor is known soonest
        running.filled_on.setdefault(number, {})[stream] = stream
        if stream not in self._fillers:
            self._fillers[stream] = stream
            _let_wait(stream, self._planned_on[device])

    def _running(self) -> Round:
        """The round of the backward that runs; begin it where this is its first gradient."""
        if self._round is not None and self._round.is_of(torch._C._current_graph_task_id()):
            return self._round  # for all gradients but the first: Python's frames tell no more
        task = _task()
        if self._round is not None and self._round.has_failed(task):
            self._abandon(self._round)
        if self._round is not None and self._round.is_behind and task is not None:
            self._finish(self._round)
        if self._round is None:
            self._round = self._begin()
        if _gone(self._round.end):
            is_known = not _gone(self._end) and task in (None, self._end_task)
            self._round.end = self._end if is_known else self._ask_for_end()
            self._round.task = self._end_task if is_known else task
            self._round.is_behind = False
        return self._round

    def _begin(self) -> Round:
        if self.refusal is not None:
            raise self.refusal()
        if self._tally is not None:
            self._learn(self._tally.result())
        wanted = {i for i, p in enumerate(self.parameters) if p.requires_grad}
        if wanted != self._bucket_of.keys():
            self._refuse_fixed(wanted)
            self._plan()
        self._refuse_held()
        for bucket in self.buckets:
            bucket.missing = sum(self._expected.get(i, 1) > 0 for i in bucket.indices)
        return Round(syncs=self.is_last_microbatch)

    def _refuse_fixed(self, wanted: set[int]) -> None:
        if not self.is_fixed:
            return
        changed = self._named(sorted(wanted ^ self._bucket_of.keys()))
        raise ConfigError(
            f"{changed} was frozen or unfrozen after the optimizer was sharded.",
            why="each rank keeps the state of its part of the buckets, and those would be others.",
            instead="freeze before shard_optimizer(); or remove() the sharded optimizer, freeze, "
            "and shard again.",
        )

    def _refuse_held(self) -> None:
        """Refuse to write over sums that no step has used."""
        if not self.holds_sums:
            return
        if self.shows_sums and not any(
            self.parameters[index].grad is grad for index, grad in self.shown.items()
        ):
            self.holds_sums = False
            return
        raise ConfigError(
            "a backward began while the gradients of the one before were not yet used.",
            why="they were scattered over the ranks, and cannot be added to any more.",
            instead="call step() or zero_grad() of the sharded optimizer first (zero_grad() of the "
            "model does not reach them); to add up several backwards, run all but the last in "
            "no_sync().",
        )

    def _learn(self, result: TallyResult) -> None:
        """Take what the last round told: the order, from the first rank, and the parts."""
        self._refuse_failed(result)
        self._tally = None
        self._expected = {i: n for i, n in enumerate(result.arrivals) if n > 0}
        if result.new_order and not self.is_fixed:
            self._order = self._ranks.from_first(
                self.last.order, len(self.parameters), self._device
            )
            self._plan()

    def _launch_full(self, running: Round) -> None:
        while running.launched < len(self.buckets):
            if self.buckets[running.launched].missing > 0:
                return
            self._launch(running)

    def _launch(self, running: Round) -> None:
        """Send the next bucket."""
        bucket = self.buckets[running.launched]
        self._wait_for_fillers(running, running.launched)
        running.held.update(zip(bucket.indices, bucket.let_go(), strict=True))
        running.events.append(("launch", running.launched))
        self._send(running.launched)
        running.launched += 1

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        if self._config.average:
            bucket.flat.mul_(1 / self._ranks.size)
        with self._ending(), self._ranks.named(f"bucket {number}", self._held_by(bucket)):
            if bucket.shard is None:
                bucket.work = self._ranks.all_reduce(bucket.flat)
            else:
                bucket.work = self._ranks.reduce_scatter(bucket.shard, bucket.flat)
        self.collectives += 1

    def _wait_for_fillers(self, running: Round, number: int) -> None:
        """Make the current stream wait for those on which a bucket's gradients were accumulated."""
        device = self.buckets[number].flat.device
        current = backend_of(device).current_stream(device)
        for stream in running.filled_on.get(number, {}).values():
            _let_wait(current, stream)

    def _ended(self) -> None:
        """Autograd has come to the end of a backward."""
        with self._lock:
            running = self._round
            if running is None:  # autograd.grad, which accumulates nothing
                return
            if _is_inside():
                running.is_behind = True
            elif not running.syncs:
                self._round = None
            else:
                self._finish(running)

    def wait(self) -> None:
        """Wait until what was sent has arrived; send what a backward left unsent."""
        with self._lock:
            if self._round is not None and self._round.has_failed(_task()):
                self._abandon(self._round)
            if self._round is not None and self._round.syncs:
                self._finish(self._round)

    def send(self) -> None:
        """Reduce what is accumulated, where this rank has no backward to do it."""
        with self._lock:
            self.wait()
            if self._round is None and self.is_last_microbatch:
                self._round = self._begin()
                self._finish(self._round)

    def _finish(self, running: Round) -> None:
        """Send the buckets that are left, wait for all, and give the gradients back."""
        learning = not self._expected
        while running.launched < len(self.buckets):
            self._launch(running)
        count = len(self.parameters)
        used = [running.held.get(index, False) or index in running.late for index in range(count)]
        arrivals = [running.arrivals[index] for index in range(count)]
        new_order = self._is_new(running.order)
        tally = self._gather(used, arrivals, new_order, failed=False)
        self.last, self._round, self._tally = running, None, tally
        self.rounds += 1
        result: TallyResult | None = None
        is_whole = not running.late and all(used[index] for index in self._bucket_of)
        if learning or tally.is_near or not is_whole:
            result = tally.result()
            self._refuse_failed(result)
        late = self._late_ones(running, result, learning) if result is not None else []
        self._give_back(late, result.used if result is not None else used)

    def _gather(
        self, used: Sequence[bool], arrivals: Sequence[int], new_order: bool, *, failed: bool
    ) -> Tally:
        """Send the tally, and wait until it and all buckets have arrived."""
        with self._ending(), self._ranks.named("the tally of gradients", "all of them"):
            tally = Tally(used, arrivals, new_order, failed, self._device, self._ranks)
        for number, bucket in enumerate(self.buckets):
            self._wait_for(bucket, f"bucket {number}", self._held_by(bucket))
        self._wait_for(tally, "the tally of gradients", "all of them")
        tally.arrived()
        return tally

    def _refuse_failed(self, result: TallyResult) -> None:
        """Raise where the backward of a rank failed, and keep no gradient."""
        if not result.failed:
            return
        self._tally = None
        for index in self._bucket_of:
            self.parameters[index].grad = None
        raise CommunicationError(
            "the backward of a rank was ended by an exception.",
            why="its part of the gradients is missing, so that they are nobody's. Without an "
            "accelerator the backward that ended so tells. With one the next backward does, on all "
            "ranks, since the host does not wait: an optimizer may have used the gradients by now.",
            instead="begin again from a checkpoint; or, where no optimizer has stepped since, "
            "catch the error on all ranks alike, call zero_grad() and go on.",
        )

    def _late_ones(
        self, running: Round, result: TallyResult, learning: bool
    ) -> list[tuple[int, Tensor]]:
        """Send what came behind its bucket; the ranks agree on what that is."""
        if running.late and not learning:
            names = self._named(sorted(running.late))
            raise CommunicationError(
                f"gradients of {names} came in more parts than in the backward before.",
                why="their bucket had left with what there was: segments that are checkpointed "
                "with use_reentrant=True tell autograd of each use of a parameter by itself.",
                instead="use use_reentrant=False, or overlap=False.",
            )
        late = []
        for index in self._bucket_of if learning else ():
            if result.arrivals[index] < 2:
                continue
            view = self.buckets[self._bucket_of[index]].view(index)
            grad = self.parameters[index].grad
            part = torch.zeros_like(view) if grad is None else grad.detach().to(view.dtype)
            if self._config.average:
                part.mul_(1 / self._ranks.size)
            what, names = "what came behind a bucket", f"a part of {self.names[index]}"
            with self._ending():
                with self._ranks.named(what, names):
                    work = self._ranks.all_reduce(part)
                self._ranks.wait(work, what, names)
            late.append((index, part))
        return late

    def _give_back(self, late: Sequence[tuple[int, Tensor]], used: Sequence[bool]) -> None:
        """Let each `p.grad` be what came of it: None where no rank had a gradient."""
        for index, part in late:
            bucket = self.buckets[self._bucket_of[index]]
            bucket.add(index, part, self._ranks.number)
        for bucket in self.buckets:
            for index in bucket.indices:
                if used[index] and bucket.shard is None:
                    bucket.give_back(index)
                else:
                    bucket.forget(index)
        self.used = list(used)
        self.holds_sums = self.is_fixed and any(used)
        if self.after_round is not None:
            self.after_round(self)

    def _is_new(self, order: Sequence[int]) -> bool:
        """Whether buckets would be others if gradients came in this order, as they did before."""
        if not order or self.is_fixed:
            return False
        planned = [index for bucket in self.buckets for index in bucket.indices]
        again = not self._expected or list(order) == self.last.order
        return again and list(order) != planned

    def _wait_for(self, sent: Bucket | Tally, what: str, names: str) -> None:
        work, sent.work = sent.work, None
        if work is not None:
            with self._ending():
                self._ranks.wait(work, what, names)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End a round whose collectives have failed: what is left of it arrives nowhere."""
        try:
            yield
        except CommunicationError:
            self._round = self._tally = None
            for bucket in self.buckets:
                bucket.work = None
                for index in bucket.indices:
                    bucket.forget(index)
            raise

    def _abandon(self, failed: Round) -> None:
        """End a backward that an exception has ended, so that no rank waits for the rest of it."""
        self._round = None
        if not failed.syncs:
            return
        for number, bucket in enumerate(self.buckets[failed.launched :], failed.launched):
            self._wait_for_fillers(failed, number)  # autograd has not, as it ended early
            bucket.leave()  # what it holds, or what has arrived since, stays where it is found
            bucket.flat.zero_()
            self._send(number)
        nothing = [0] * len(self.parameters)
        tally = self._gather([False] * len(nothing), nothing, False, failed=True)
        if not tally.is_near:
            self._tally = tally  # where the others are told, in the next backward, so is this rank

    def _held_by(self, bucket: Bucket) -> str:
        return f"the gradients of {self._named(bucket.indices)}"

    def _named(self, indices: Sequence[int]) -> str:
        names = ", ".join(self.names[index] for index in indices[:_NAMES_SHOWN])
        left = len(indices) - _NAMES_SHOWN
        return f"{names} and {left} more" if left > 0 else names

    def _refuse_sparse(self, index: int) -> None:
        grad = self.parameters[index].grad
        if grad is not None and grad.layout != torch.strided:
            raise ConfigError(
                f"the gradient of {self.names[index]} is sparse.",
                why="gradients travel in flat, dense buckets.",
                instead="build the embedding with sparse=False.",
            )

    # What the handle uses

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate in backwards that run in this context, and send nothing."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def has_any(self, identities: set[int]) -> bool:
        """Whether a parameter is among those with these ids."""
        return any(id(self.parameters[index]) in identities for index in self._bucket_of)

    def remove(self) -> None:
        """Watch no gradient any more, and hold none."""
        with self._lock:
            self.wait()
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._call.remove()
            for bucket in self.buckets:
                bucket.leave()
            self.buckets = []


def _let_wait(stream: Stream, other: Stream) -> None:
    if stream != other:
        stream.wait_stream(other)


def _gone(end: weakref.ref[End] | None) -> bool:
    return end is None or end() is None


def _task() -> int | None:
    """Autograd's number of the backward that this thread runs: -1 for none, None within another."""
    return None if _is_inside() else torch._C._current_graph_task_id()


def _is_inside() -> bool:
    """Whether a Python function's backward is being run by this thread."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# What autograd calls to run the backward of a Python function.
_APPLY = torch.autograd.function.BackwardCFunction.apply.__code__
