"""Activation recompute: an MLP's activations are rebuilt just before backward needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.saved import Region
from ascend_core.scope import around_forward
from ascend_recompute import _modules
from ascend_recompute._recorder import RebuildKeeper
from ascend_recompute._recording import Recording
from ascend_recompute.config import RecomputeActivationConfig
from ascend_recompute.policy import DEFAULT, Policy

__all__ = ["ActivationRecompute", "rebuild_region", "recompute_activation"]


class ActivationRecompute:
    """The handle of `recompute_activation`: activation recompute as it is on.

    [Note: two reaches]
    Calls are recorded only inside the chosen modules, but what they make is often saved by a
    module outside (the consumer of an activation may be anybody's). So the hooks that see saved
    tensors reach over the whole model's forward, and the mode that records calls over the chosen
    modules alone; the first costs about a microsecond or two per saved tensor, the second a few
    per call.
    """

    def __init__(self, model: nn.Module, modules: _modules.Named, policy: Policy) -> None:
        self._modules = list(modules)
        self._keeper = RebuildKeeper(policy)
        self._hooks = [
            around_forward(module, self._recording(name))
            for name, module in modules.items()
            if module is not model
        ]
        self._hooks.append(around_forward(model, self._whole(model, modules)))

    def _recording(self, name: str) -> Callable[[], Recording]:
        return lambda: Recording(self._keeper, name)

    def _whole(self, model: nn.Module, modules: _modules.Named) -> Callable[[], Any]:
        names = [name for name, module in modules.items() if module is model]
        keeper = self._keeper

        def open_context() -> Any:
            # A new forward begins, no checkpoint's recomputation and no validation.
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                keeper.tally.begin()
            return Recording(keeper, names[0]) if names else Region(keeper)

        return open_context

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


def recompute_activation(
    model: nn.Module,
    config: RecomputeActivationConfig | None = None,
    *,
    modules: Sequence[str | type[nn.Module]] | None = None,
    layers: Sequence[int] | None = None,
    policy: Policy | None = None,
) -> ActivationRecompute:
    """Rebuild the activations of the model's MLPs in backward instead of keeping them.

    Inside the chosen modules every activation function, elementwise product or sum, cast and
    dropout is recorded; where autograd saves the result of one, it gets a recipe in its place,
    and the value is computed again when backward asks for it. The model's code, classes and
    state dict stay as they are. Loss, gradients and weights are equal to the plain run, bit for
    bit. A recipe is used only where its inputs are held by autograd anyway, so no model ever
    holds more than without.

    Args:
        model: Any module; the MLPs are looked for inside it.
        config: The options; or give them by keyword.
        modules: As in `RecomputeActivationConfig`.
        layers: As in `RecomputeActivationConfig`.
        policy: As in `RecomputeActivationConfig`.

    Returns:
        A handle: `report()` says how many bytes each module no longer holds, `remove()` undoes.

    Raises:
        ConfigError: When options are given twice, or name modules that the model does not have.

    Example:
        >>> handle = recompute_activation(model)
        >>> model(batch).backward()
        >>> handle.report()["saved_bytes"]
    """
    if config is None:
        config = RecomputeActivationConfig(modules=modules, layers=layers, policy=policy)
    elif (modules, layers, policy) != (None, None, None):
        raise ConfigError(
            "recompute_activation was given a config and single options as well.",
            instead="put everything into the config, or everything into keywords.",
        )
    _check(model, config)
    found = _modules.select(model, config.modules, config.layers)
    return ActivationRecompute(model, found, config.policy or DEFAULT)


def _check(model: object, config: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"recompute_activation was given a {type(model).__name__} as its model.",
            why="it works on modules.",
            instead="pass the model itself, a torch.nn.Module.",
        )
    if not isinstance(config, RecomputeActivationConfig):
        raise ConfigError(
            f"recompute_activation was given a {type(config).__name__} as its config.",
            instead="pass RecomputeActivationConfig(...), or its fields as keywords.",
        )
    if not isinstance(config.policy, (Policy, type(None))):
        raise ConfigError(
            f"policy is a {type(config.policy).__name__}.",
            why="it says which operators may be run again.",
            instead="start from ascend_recompute.policy.DEFAULT, and extend it.",
        )


@contextlib.contextmanager
def rebuild_region(policy: Policy | None = None, *, label: str = "region") -> Iterator[Any]:
    """Rebuild in backward what cheap operators make inside the block; for code without modules.

    Args:
        policy: Which operators may be run again; `ascend_recompute.policy.DEFAULT` by default.
        label: The name in the report.

    Yields:
        An object whose `by_label()` tells the bytes that are no longer held.

    Example:
        >>> with rebuild_region():
        ...     y = down(torch.nn.functional.silu(gate(x)) * up(x))
    """
    keeper = RebuildKeeper(policy or DEFAULT)
    with Recording(keeper, label):
        yield keeper.tally
