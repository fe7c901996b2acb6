"""Reduces the gradients of one model chunk while its backward runs.

[Note: a round]
A round is one backward. It begins with the first gradient that is complete and ends with the
callback that autograd calls behind a backward (see `_backward`). In between every gradient makes
its bucket fuller, and full buckets leave, always in the order of the plan, so that all ranks send
the same. At the end the buckets that are not full leave as they are: where a parameter has no
gradient, with zeros.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from ascend_core.errors import CommunicationError, ConfigError
from ascend_ddp._backward import Ends, is_inside, running_task
from ascend_ddp._buckets import Buckets
from ascend_ddp._called import Called
from ascend_ddp._parameters import Parameters, lists_plainly
from ascend_ddp._ranks import Ranks
from ascend_ddp._round import Round
from ascend_ddp._sender import Sender
from ascend_ddp._sums import Sums
from ascend_ddp._taking import REDUCING, refuse_taken
from ascend_ddp._tally import Tally, TallyResult
from ascend_ddp.config import DDPConfig

__all__ = ["Reducer"]


class Reducer:
    """The hooks that fill the buckets of a model chunk.

    Args:
        chunk: The module; its parameters that require no gradient take part as soon as they do.
        config: The options.
        group: Of the ranks that hold the same model.

    Attributes:
        is_last_microbatch: Whether the next backward sends what was accumulated.
        last: What happened in the last round that sent.
        rounds: How many backwards have sent, so far.
        waits_at_end: Whether the end of a backward waits for what it sent. Otherwise `wait()` does,
            and the backwards of other chunks run beside it.
        chunk: The module, while it lives.
        parameters: Of the chunk, in the order of their indices.
        buckets: In the order in which they leave.
        sums: What the last round that sent has left.
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
        self.last = Round(syncs=True)
        self.rounds = 0
        self.waits_at_end = True
        self.chunk = weakref.ref(chunk)
        self.parameters = Parameters(dict(chunk.named_parameters()))
        self._is_plain = lists_plainly(chunk)
        self.refusal: Callable[[], Exception] | None = None
        self._overlaps = config.overlap
        self._ranks = Ranks(group, config.timeout_s)
        self._lock = threading.RLock()
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._ends = Ends()
        self._round: Round | None = None
        self._tally: Tally | None = None
        self._unsent: set[int] = set()  # have gradients that were accumulated only
        self.buckets = Buckets(self.parameters, config, self._ranks)
        self.sums = Sums(self.parameters)
        self._sender = Sender(self.buckets, self._ranks, average=config.average)
        self._watch()
        self._call = chunk.register_forward_hook(Called(self))

    @property
    def group(self) -> distributed.ProcessGroup | None:
        """Of the ranks that hold the same model; None for all."""
        return self._ranks.group

    @property
    def ranks(self) -> Ranks:
        """Those of the group."""
        return self._ranks

    @property
    def collectives(self) -> int:
        """How often buckets were sent, so far."""
        return self._sender.collectives

    # What tells it of a backward

    def _watch(self) -> None:
        """Be told of the gradients of all parameters that are in a bucket."""
        for index in self.buckets.number_of.keys() - self._hooks.keys():

            def arrived(parameter: nn.Parameter, index: int = index) -> None:
                self._arrived(index, parameter)

            refuse_taken(self.parameters.names[index], self.parameters[index])
            arrived.taker = REDUCING  # type: ignore[attr-defined]
            self._hooks[index] = self.parameters[index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                arrived
            )

    def called(self, output: Any) -> None:
        """The chunk was called: a backward may come.

        Raises:
            ConfigError: When it has got another first parameter: none of ours may be used any more.
        """
        chunk = self.chunk()
        first = None if chunk is None else next(chunk.parameters(), None)
        if torch.is_grad_enabled() and isinstance(first, nn.Parameter):
            self._refuse_unknown([first])
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, grad: Tensor) -> None:
        """Backward, or autograd.grad, has come to the chunk's output: be told when it has ended."""
        with self._lock:
            if self.buckets:
                self._ends.expect(self._ended)

    def _arrived(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient, or a part of one, was accumulated."""
        with self._lock:
            running = self._running()
            running.arrivals[index] += 1
            running.events.append(("gradient", index))
            number = self.buckets.number_of[index]
            bucket = self.buckets[number]
            if running.syncs and number < running.launched:
                running.late.add(index)
                return
            self.buckets.fillers.note(running, number, bucket)
            parts = self.buckets.parts
            left = parts.get(index, 1) - running.arrivals[index]
            # Where a hook of the user's has still to see the gradient, a later one sends it.
            sends = running.syncs and self._is_last_hook(index, parameter)
            grad = parameter.grad
            if grad is not None:
                if grad.layout != torch.strided:
                    raise self._sparse(index)
                if sends and left <= 0 and parts:
                    bucket.take_whole(index, parameter, grad, self._sender.factor)
                else:
                    bucket.take(index, parameter, grad)
            if left == 0:
                running.order.append(index)
                bucket.missing -= 1
            if sends and self._overlaps and not bucket.missing:
                with self._ending():
                    self._sender.launch_full(running)

    def _is_last_hook(self, index: int, parameter: nn.Parameter) -> bool:
        """Whether no other hook of a parameter comes behind ours; from the next time on, none."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        own = self._hooks[index].id
        if next(reversed(hooks)) == own:
            return True
        hooks[own] = hooks.pop(own)  # autograd calls them in the order of the dictionary below
        return False

    def _ended(self) -> None:
        """Autograd has come to the end of a backward."""
        with self._lock:
            running = self._round
            if running is None:  # autograd.grad, which accumulates nothing
                return
            if is_inside():
                running.is_behind = True
            elif running.task not in (None, torch._C._current_graph_task_id()):
                return  # an autograd.grad within a hook of the backward, which goes on
            elif not running.syncs:
                self._keep_unsent(running)
            else:
                self._end_round(running)

    def _end_round(self, running: Round) -> None:
        if self.waits_at_end:
            self._finish(running)
            return
        with self._ending():
            self._sender.launch_rest(running)
        running.is_behind = True  # whatever comes next finishes it

    # A round

    def _running(self) -> Round:
        """The round of the backward that runs; begin it where this is its first gradient."""
        running = self._round
        if running is not None and running.is_of(torch._C._current_graph_task_id()):
            return running  # for all gradients but the first: Python's frames tell no more
        task = running_task()
        if self._round is not None and self._round.has_failed(task):
            self._abandon(self._round)
        behind = self._round
        # Within another backward, where both are one to us, `no_sync` still tells them apart.
        if (
            behind is not None
            and behind.is_behind
            and (task is not None or behind.syncs != self.is_last_microbatch)
        ):
            self._close(behind)
        if self._round is None:
            self._round = self._begin()
        if not self._round.has_end:
            self._round.end, self._round.task = self._ends.of(task, self._ended)
            self._round.is_behind = False
        return self._round

    def _begin(self) -> Round:
        if self.refusal is not None:
            raise self.refusal()
        if self._tally is not None:
            result = self._told(self._tally)
            self._refuse_failed(result)
            self._tally = None
            self.buckets.learn(result, self.last.order)
        chunk = self.chunk()
        if chunk is not None and not (self._is_plain and self.parameters.are_all_of(chunk)):
            self._refuse_unknown(chunk.parameters())
        self.buckets.renew(self._unsent)
        self._watch()
        self.sums.refuse_held()
        self.buckets.await_all()
        return Round(syncs=self.is_last_microbatch)

    def wait(self) -> None:
        """Wait until what was sent has arrived; send what a backward left unsent.

        Raises:
            ConfigError: Within a backward.
        """
        with self._lock:
            if self._round is not None and self._round.has_failed(running_task()):
                self._abandon(self._round)
            running = self._round
            if running is None:
                return
            if torch._C._current_graph_task_id() == -1:
                self._close(running)
            elif running.syncs:
                raise self._within_backward()

    def _close(self, running: Round) -> None:
        """End a round whose backward has ended, which autograd could not tell."""
        if running.syncs:
            self._finish(running)
        else:
            self._keep_unsent(running)

    def _keep_unsent(self, running: Round) -> None:
        """End a round that has accumulated only."""
        self._unsent |= running.arrivals.keys()
        self._round = None

    def send(self) -> None:
        """Reduce what is accumulated, where this rank has no backward to do it."""
        with self._lock:
            sent = self.rounds
            self.wait()
            if self.rounds == sent and self._round is None and self.is_last_microbatch:
                self._round = self._begin()
                self._end_round(self._round)

    def _finish(self, running: Round) -> None:
        """Send the buckets that are left, wait for all, and give the gradients back."""
        learning = not self.buckets.parts
        count = range(len(self.parameters))
        with self._ending():
            self._sender.launch_rest(running)
            used = [running.held.get(index, False) or index in running.late for index in count]
            arrivals = [running.arrivals[index] for index in count]
            is_wrong = bool(running.late) and not learning  # nobody may use this: all are told
            new_order = self.buckets.is_new(running.order, self.last.order)
            tally = self._sender.tally(used, arrivals, new_order, failed=is_wrong)
        self._unsent.clear()
        self.last, self._round, self._tally = running, None, tally
        self.rounds += 1
        if is_wrong:
            self._tally = tally if not tally.is_near else None
            self.buckets.forget()
            raise self._unexpected(running.late)
        result: TallyResult | None = None
        is_whole = not running.late and all(used[index] for index in self.buckets.number_of)
        if learning or tally.is_near or not is_whole:
            result = self._told(tally)
            self._refuse_failed(result)
        if result is not None and learning:
            self._add_late(result)
        self._give_back(result.used if result is not None else used)

    def _told(self, tally: Tally) -> TallyResult:
        """What ranks told in a round. An accelerator's collectives that failed show here."""
        with self._ending(), self._ranks.named(*self._sender.sent):
            return tally.result()

    def _add_late(self, result: TallyResult) -> None:
        """Send what came behind its bucket, and add it; the ranks agree on what that is."""
        for index, number in self.buckets.number_of.items():
            if result.arrivals[index] < 2:
                continue
            grad = self.parameters[index].grad
            with self._ending():
                part = self._sender.late(index, grad, self.parameters.names[index])
            self.buckets[number].add(index, part, self._ranks.number)

    def _give_back(self, used: Sequence[bool]) -> None:
        """Let each `p.grad` be what came of it: None where no rank had a gradient."""
        for bucket in self.buckets:
            for index in bucket.indices:
                if used[index] and bucket.shard is None:
                    bucket.give_back(index)
                else:
                    bucket.forget(index)
        self.sums.used = list(used)
        self.sums.are_held = self.buckets.is_fixed and any(used)
        if self.sums.are_shown:
            self.sums.show(self.buckets, self.group)

    def _abandon(self, failed: Round) -> None:
        """End a backward that an exception has ended, so that no rank waits for the rest of it."""
        self._round = None
        if not failed.syncs:
            self._keep_unsent(failed)
            return
        self.rounds += 1
        nothing = [0] * len(self.parameters)
        with self._ending():
            self._sender.launch_nothing(failed)
            tally = self._sender.tally([False] * len(nothing), nothing, False, failed=True)
        if not tally.is_near:
            self._tally = tally  # where the others are told, in the next backward, so is this rank

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End a round whose collectives have failed: what is left of it arrives nowhere."""
        try:
            yield
        except CommunicationError:
            self._round = self._tally = None
            self.buckets.forget()
            raise

    # What it refuses

    def _refuse_failed(self, result: TallyResult) -> None:
        """Raise where the backward of a rank failed, and keep no gradient."""
        if not (result.failed or result.is_mixed):
            return
        self._tally = None
        self.buckets.forget()
        if result.is_mixed:
            raise CommunicationError(
                "the gradients of two models were added up.",
                why="both were in one backward, and reached in another order on another rank, "
                "while all ranks have to send in one order.",
                instead="give them to reduce_gradients together, as one nn.ModuleList, and begin "
                "again from a checkpoint, if an optimizer has stepped since.",
            )
        raise CommunicationError(
            "the backward of a rank was ended by an exception.",
            why="its part of the gradients is missing, so that they are nobody's. Where hosts can "
            "talk (a process group with a backend for the CPU), the backward that ended so tells. "
            "Where accelerators alone do, the next backward does, on all ranks, since the host "
            "does not wait: an optimizer may have used the gradients by now.",
            instead="begin again from a checkpoint; or, where no optimizer has stepped since, "
            "catch the error on all ranks alike, call zero_grad() and go on.",
        )

    def _unexpected(self, late: set[int]) -> CommunicationError:
        return CommunicationError(
            f"gradients of {self.buckets.named(sorted(late))} came in more parts than in the "
            "backward before.",
            why="their bucket had left with what there was: segments that are checkpointed with "
            "use_reentrant=True tell autograd of each use of a parameter by itself.",
            instead="use use_reentrant=False, or overlap=False.",
        )

    def _refuse_unknown(self, parameters: Iterable[nn.Parameter]) -> None:
        known = self.parameters
        if all(parameter in known or not parameter.requires_grad for parameter in parameters):
            return
        chunk = self.chunk()
        assert chunk is not None
        name = next(n for n, p in chunk.named_parameters() if p not in known)
        raise ConfigError(
            f"{name} was given to the model after reduce_gradients.",
            why="nobody reduces its gradient, and ranks would come to differ.",
            instead="add or exchange parameters first (load_state_dict(assign=True) does that, "
            "too); or remove() the handle, and call reduce_gradients again.",
        )

    def _within_backward(self) -> ConfigError:
        return ConfigError(
            "the reduction was waited for, or removed, within a backward.",
            why="gradients that are still to come would be sent as zeros first, and then once "
            "more: buckets are complete when the backward has ended.",
            instead="call wait() or remove() when backward has returned.",
        )

    def _sparse(self, index: int) -> ConfigError:
        return ConfigError(
            f"the gradient of {self.parameters.names[index]} is sparse.",
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
        return any(id(self.parameters[index]) in identities for index in self.buckets.number_of)

    def remove(self) -> None:
        """Watch no gradient any more, and hold none."""
        with self._lock:
            self.wait()
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()
            self._call.remove()
            self.buckets.leave()
