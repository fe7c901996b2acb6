"""What is done before an optimizer steps: its gradients must be whole, and be there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ascend_core.errors import ConfigError
from ascend_ddp._reducer import Reducer

__all__ = ["BeforeStep"]


class BeforeStep:
    """A hook before the steps of all optimizers, which does something for ours.

    A rank that had no backward since the optimizer's last step has nothing to add, and the others
    wait for it: it sends zeros. A step that is given a closure has its backward in there. The hook
    goes when the last of the reducers does, whose life is the model's.

    Args:
        reducers: Of the model chunks.

    Attributes:
        admitted: Who may step parameters whose gradients are scattered.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        self._reducers = [weakref.ref(reducer) for reducer in reducers]
        self._seen: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self.admitted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_pre_hook(self)
        for reducer in reducers:
            weakref.finalize(reducer, self._remove_with_the_last)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Finish what travels.

        Raises:
            ConfigError: When a backward is running, or the optimizer would find no gradient.
        """
        reducers = self._of(optimizer)
        if not reducers:
            return
        _refuse_within_backward(optimizer)
        self._refuse_scattered(optimizer, reducers)
        if kwargs.get("closure") is None and not any(map(callable, args[1:])):
            self.send(optimizer)
        for reducer in reducers:
            reducer.wait()
        self._seen[optimizer] = [reducer.rounds for reducer in reducers]

    def send(self, optimizer: Optimizer) -> None:
        """Finish what travels; send zeros, if nothing was sent since the optimizer's last step."""
        reducers = self._of(optimizer)
        for reducer in reducers:
            reducer.wait()
        rounds = [reducer.rounds for reducer in reducers]
        if self._seen.get(optimizer, [0] * len(rounds)) == rounds:
            for reducer in reducers:
                reducer.send()

    def _of(self, optimizer: Optimizer) -> list[Reducer]:
        """The reducers that have a parameter of the optimizer's."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [r for ref in self._reducers if (r := ref()) is not None and r.has_any(held)]

    def _refuse_scattered(self, optimizer: Optimizer, reducers: Sequence[Reducer]) -> None:
        if optimizer in self.admitted:
            return
        if any(bucket.shard is not None for reducer in reducers for bucket in reducer.buckets):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"a {kind} steps parameters whose gradients are scattered.",
                why="with mode='reduce-scatter' each rank has the sums of its own part alone, and "
                "p.grad is None: nothing would be trained.",
                instead="step them with what shard_optimizer() returned, all in groups of one "
                "optimizer, or use mode='all-reduce'.",
            )

    def _remove_with_the_last(self) -> None:
        if all(reference() is None for reference in self._reducers):
            self.remove()

    def remove(self) -> None:
        """Do no more."""
        self._hook.remove()


def _refuse_within_backward(optimizer: Optimizer) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            f"a {type(optimizer).__name__} stepped within a backward.",
            why="gradients of its parameters are reduced in buckets, which are complete when the "
            "backward has ended; a hook sees this rank's own gradient.",
            instead="step when backward has returned, or leave reduce_gradients out.",
        )
