"""What is done before an optimizer steps: its gradients must be whole."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ascend_ddp._reducer import Reducer

__all__ = ["BeforeStep"]


class BeforeStep:
    """A hook before the steps of all optimizers, which does something for ours.

    A rank that had no backward since the optimizer's last step has nothing to add, and the others
    wait for it: it sends zeros. A step that is given a closure has its backward in there. The hook
    goes when the reducers do, whose life is the model's.

    Args:
        reducers: Of the model chunks.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        self._reducers = [weakref.ref(reducer) for reducer in reducers]
        self._seen: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_pre_hook(self)
        for reducer in reducers:
            weakref.finalize(reducer, self._hook.remove)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Finish what travels."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        reducers = [r for ref in self._reducers if (r := ref()) is not None and r.has_any(held)]
        rounds = [reducer.rounds for reducer in reducers]
        has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        if not has_closure and self._seen.get(optimizer) == rounds:
            for reducer in reducers:
                reducer.send()
        for reducer in reducers:
            reducer.wait()
        self._seen[optimizer] = [reducer.rounds for reducer in reducers]

    def remove(self) -> None:
        """Do no more."""
        self._hook.remove()
