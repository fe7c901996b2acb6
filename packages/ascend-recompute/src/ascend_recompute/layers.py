"""Full recompute: whole layers run again in backward, and of what they save nothing is held."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.saved import backward_runs
from ascend_core.scope import around_call, around_forward, owners
from ascend_core.stack import Named, Stack, find_stack, first_layers, named_stack
from ascend_core.surroundings import context_maker
from ascend_recompute._options import check_model, merged
from ascend_recompute._replay import Replay, is_worthwhile
from ascend_recompute._tally import Tally
from ascend_recompute._values import ValueRecompute
from ascend_recompute.config import RecomputeLayersConfig

__all__ = ["LayersRecompute", "recompute_layers"]

Call = Callable[..., Any]


class _Latest(threading.local):
    """The layer that this thread called last, and its replay while anything needs that."""

    position = -1
    replay: Callable[[], Replay | None] = staticmethod(lambda: None)
    in_model = False  # whether the layer is called by the model, and not by itself


class LayersRecompute:
    """The handle of `recompute_layers`: full recompute as it is on."""

    def __init__(
        self, model: nn.Module, layers: Named, group: int, config: RecomputeLayersConfig
    ) -> None:
        self._layers = list(layers)
        self._group = group
        self._config = config
        inner = (module for layer in layers.values() for module in layer.modules())
        self._context = context_maker(inner, config.context_fn)
        self._tally = Tally()
        self._latest = _Latest()
        self._hooks = [
            around_call(layer, functools.partial(self._run, position), owner=self)
            for position, layer in enumerate(layers.values())
        ]
        self._hooks.append(around_forward(model, self._forward_of_model))

    @contextlib.contextmanager
    def _forward_of_model(self) -> Iterator[None]:
        """Count anew, whichever layers the model calls, and however often."""
        before, self._latest.in_model = self._latest.in_model, True
        self._count_anew()
        try:
            yield
        finally:
            self._latest.in_model = before

    def _count_anew(self) -> None:
        if not backward_runs() and is_worthwhile():
            self._tally.begin()

    def _run(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_worthwhile():
            return call(*args, **kwargs)
        if position == 0 and not self._latest.in_model:
            self._count_anew()
        name, latest = self._layers[position], self._latest
        follows = position % self._group != 0 and latest.position == position - 1
        replay = Replay(
            call,
            args,
            kwargs,
            context_fn=self._context(),
            before=latest.replay() if follows else None,
            label=name or "the model",
            verify=self._config.verify,
            early_stop=self._config.early_stop,
        )
        outputs = replay.forward(args, kwargs)
        latest.position, latest.replay = position, weakref.ref(replay)
        self._tally.add(name, replay.dropped_bytes)
        return outputs

    def replays(self, name: str) -> bool:
        """Whether the module of this name is among the chosen layers."""
        return name in self._layers

    def report(self) -> dict[str, Any]:
        """What was not held in the latest forward that ran with gradients on.

        Returns:
            `layers`: the qualified names of the layers; `saved_bytes_by_layer`: for each the bytes
            that it saved in vain: nobody holds them between its forward and its backward;
            `saved_bytes`: their sum.
        """
        dropped = self._tally.by_label()
        by_layer = {name: dropped.get(name, 0) for name in self._layers}
        return {
            "layers": list(self._layers),
            "saved_bytes_by_layer": by_layer,
            "saved_bytes": sum(by_layer.values()),
        }

    def remove(self) -> None:
        """Call the layers as ever. Graphs that were made before can still run backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def recompute_layers(
    model: nn.Module,
    config: RecomputeLayersConfig | None = None,
    *,
    method: Literal["block", "uniform"] | None = None,
    num_layers: int | None = None,
    layers: Sequence[int] | None = None,
    stack: str | None = None,
    context_fn: Callable[[], AbstractContextManager[Any]] | None = None,
    early_stop: bool = False,
    verify: bool = False,
) -> LayersRecompute:
    """Run whole layers again in backward instead of keeping what they save.

    Of a chosen layer only the inputs are held; before its backward it runs again, under the random
    state and the autocast mode of its forward. Saves the most and costs a second forward of the
    chosen layers. Loss, gradients and weights are equal to the plain run, bit for bit.

    Apply it before `recompute_activation` and `recompute_norm`, which then leave the chosen layers
    alone: a layer is never both. In pipeline parallelism apply it to each stage; layers are
    counted per stage.

    Args:
        model: Any module with a stack of layers.
        config: The options; or give them by keyword.
        method: As in `RecomputeLayersConfig`.
        num_layers: As in `RecomputeLayersConfig`.
        layers: As in `RecomputeLayersConfig`.
        stack: As in `RecomputeLayersConfig`.
        context_fn: As in `RecomputeLayersConfig`.
        early_stop: As in `RecomputeLayersConfig`.
        verify: As in `RecomputeLayersConfig`.

    Returns:
        A handle: `report()` says how many bytes each layer no longer holds, `remove()` undoes.

    Raises:
        ConfigError: When options are given twice, ask for more layers than there are, or for one
            in which values are rebuilt already, or when the model has no stack of layers.

    Example:
        >>> handle = recompute_layers(model, method="block", num_layers=4)
        >>> model(batch).backward()
    """
    config = merged(
        recompute_layers,
        RecomputeLayersConfig,
        config,
        method=method,
        num_layers=num_layers,
        layers=layers,
        stack=stack,
        context_fn=context_fn,
        early_stop=early_stop,
        verify=verify,
    )
    check_model(recompute_layers, model)
    there = _stack_of(model, config.stack)
    chosen = _chosen(there, config)
    _check_free(model, chosen)
    group = config.num_layers or 1 if config.method == "uniform" else 1
    return LayersRecompute(model, chosen, group, config)


def _stack_of(model: nn.Module, name: str | None) -> Stack:
    stack = find_stack(model) if name is None else named_stack(model, name)
    if stack is None:
        raise ConfigError(
            f"this {type(model).__name__} has no stack of layers.",
            why="none of its modules is a ModuleList, or a Sequential of equal modules.",
            instead="name the container with stack=, or checkpoint the function yourself with "
            "CheckpointWithoutOutput.",
        )
    return stack


def _chosen(stack: Stack, config: RecomputeLayersConfig) -> Named:
    count = len(stack.layers)
    if config.num_layers is not None and config.num_layers > count:
        raise ConfigError(
            f"num_layers is {config.num_layers}, and there are {count} layers.",
            why=f"{stack.name or 'the model itself'} holds no more (in this pipeline stage).",
            instead=f"use a number from 1 to {count}.",
        )
    if config.layers is not None:
        return first_layers(stack, config.layers)
    first = config.num_layers if config.method == "block" else None
    return first_layers(stack, range(count if first is None else first))


def _check_free(model: nn.Module, chosen: Named) -> None:
    """Refuse layers on which another recompute is on."""
    for module in model.modules():
        for owner in owners(module):
            taken = _taken(owner, chosen)
            if taken:
                raise ConfigError(
                    f"{taken[0]} is recomputed already.",
                    why="a layer is never recomputed in two ways.",
                    instead="apply recompute_layers first; recompute_activation and recompute_norm "
                    "then take the layers that are left.",
                )


def _taken(owner: object, chosen: Named) -> list[str]:
    if isinstance(owner, ValueRecompute):
        return [name for name in chosen if owner.rebuilds(name)]
    if isinstance(owner, LayersRecompute):
        return [name for name in chosen if owner.replays(name)]
    return []
