"""The handle of the verbs that rebuild values: `recompute_activation` and `recompute_norm`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ascend_core.saved import Region, backward_runs
from ascend_core.scope import around_forward
from ascend_core.stack import Named
from ascend_recompute._recorder import RebuildKeeper
from ascend_recompute._recording import Recording
from ascend_recompute.policy import Policy

__all__ = ["ValueRecompute"]


class ValueRecompute:
    """Recompute of values, as it is on.

    [Note: two reaches]
    Calls are recorded only inside the chosen modules, but what they make is often saved by a
    module outside (the consumer of an activation may be anybody's). So the hooks that see saved
    tensors reach over the whole model's forward, and the mode that records calls over the chosen
    modules alone; the first costs about a microsecond or two per saved tensor, the second a few
    per call.
    """

    def __init__(
        self, model: nn.Module, modules: Named, policy: Policy, *, verify: bool = False
    ) -> None:
        self._modules = list(modules)
        self._keeper = RebuildKeeper(policy, verify=verify)
        self._hooks = [
            around_forward(module, self._recording(name), owner=self)
            for name, module in modules.items()
            if module is not model
        ]
        self._hooks.append(around_forward(model, self._whole(model, modules), owner=self))

    def _recording(self, name: str) -> Callable[[], Recording]:
        return lambda: Recording(self._keeper, name)

    def _whole(self, model: nn.Module, modules: Named) -> Callable[[], AbstractContextManager[Any]]:
        names = [name for name, module in modules.items() if module is model]
        keeper = self._keeper

        def open_context() -> AbstractContextManager[Any]:
            # A new forward begins, no checkpoint's recomputation and no validation.
            if torch.is_grad_enabled() and not backward_runs():
                keeper.tally.begin()
            return Recording(keeper, names[0]) if names else Region(keeper)

        return open_context

    def rebuilds(self, name: str) -> bool:
        """Whether the module of this name, or one inside it, is among the chosen ones."""
        prefix = f"{name}." if name else ""
        return any(module == name or module.startswith(prefix) for module in self._modules)

    def report(self) -> dict[str, Any]:
        """What was dropped in the latest forward that ran with gradients on.

        Returns:
            `modules`: the qualified names of the modules; `saved_bytes_by_module`: for each the
            bytes that were not held between its latest forward and its backward; `saved_bytes`:
            their sum.
        """
        dropped = self._keeper.tally.by_label()
        by_module = {name: dropped.get(name, 0) for name in self._modules}
        return {
            "modules": list(self._modules),
            "saved_bytes_by_module": by_module,
            "saved_bytes": sum(by_module.values()),
        }

    def remove(self) -> None:
        """Take all hooks off the model. Graphs that were made before can still run backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
