"""swap-attention: what attention saves for backward waits on the host, and comes back in time."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ascend_core.errors import ConfigError
from ascend_core.feature import chosen_config
from ascend_core.modules import find_attentions, find_mlps, is_called, named
from ascend_core.pinned import PinnedPool
from ascend_core.saved import Region, backward_runs
from ascend_core.scope import around_call
from ascend_core.stack import Named, find_stack, first_layers
from ascend_core.surroundings import context_maker
from ascend_swap._belongings import BelongingsOf
from ascend_swap._keeper import MovingKeeper
from ascend_swap._passes import LayerPass, Tally
from ascend_swap._traffic import Traffic
from ascend_swap.config import SwapAttentionConfig

__all__ = ["AttentionSwap", "swap_attention"]

Call = Callable[..., Any]
Run = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]

_NAMES = ("input_norm", "self_attention", "post_attention_norm")


class _Place(NamedTuple):
    """A module whose calls are ours.

    Attributes:
        number: Its own.
        layer: The position of its layer among the chosen ones.
        module: The module.
        belongings: What of it never moves.
    """

    number: int
    layer: int
    module: weakref.ref[nn.Module]
    belongings: BelongingsOf

    @property
    def trains(self) -> bool:
        """Whether a backward is going to follow a call."""
        module = self.module()
        return (
            module is not None
            and module.training
            and torch.is_grad_enabled()
            and not backward_runs()
        )


class _Latest(threading.local):
    """The pass that this thread entered last, while there is something left of it."""

    def __init__(self) -> None:
        self.entered: weakref.ref[LayerPass] | None = None


class AttentionSwap:
    """The handle of `swap_attention`: activations move while it is on.

    Args:
        model: The whole model.
        swapped: The modules whose activations move.
        recomputed: The MLPs that are recomputed.
        config: The options.
        pool: Host memory.

    Raises:
        ConfigError: When `keep_last` leaves nothing to move.
    """

    def __init__(
        self,
        model: nn.Module,
        swapped: Named,
        recomputed: Named,
        config: SwapAttentionConfig,
        pool: PinnedPool,
    ) -> None:
        self._modules = list(swapped)
        self._recomputed = list(recomputed)
        self._pool = pool
        layer_of = _layers(model, {**swapped, **recomputed})
        self._layers = list(dict.fromkeys(layer_of.values()))
        _check_keep_last(config.keep_last, len(self._layers))
        self._traffic = Traffic(len(self._layers), config.prefetch, config.keep_last)
        self._keeper = MovingKeeper(self._traffic, pool, config.min_bytes)
        self._latest = _Latest()
        chosen: list[tuple[str, nn.Module, Run]] = []
        chosen += [(name, module, _call) for name, module in swapped.items()]
        chosen += [(name, module, _recomputing(module)) for name, module in recomputed.items()]
        self._hooks = []
        for number, (name, module, run) in enumerate(chosen):
            layer = self._layers.index(layer_of[name])
            belongings = BelongingsOf(module, model)
            place = _Place(number, layer, weakref.ref(module), belongings)
            self._hooks.append(around_call(module, functools.partial(self._run, place, run), self))

    def _run(
        self, place: _Place, run: Run, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not place.trains:
            return call(*args, **kwargs)
        with Region(self._keeper) as region:
            if region.frame is None:  # inside a transform of torch.func, or while torch traces
                return call(*args, **kwargs)
            with self._keeper.inside(self._pass(place), place.belongings.now()):
                # Around the model's call somebody else may checkpoint it, and will compute it
                # again: while that backward runs, no call is ours, and it has to save the same.
                if region.frame.over_foreign:
                    return call(*args, **kwargs)
                return run(call, args, kwargs)

    def _pass(self, place: _Place) -> LayerPass:
        """The pass that a call belongs to: that of the call before it, within one layer."""
        latest = None if self._latest.entered is None else self._latest.entered()
        goes_on = (
            latest is not None
            and latest.layer == place.layer
            and latest.task is None
            and place.number not in latest.called
        )
        if latest is None or not goes_on:
            latest = self._traffic.begin(place.layer)
            self._latest.entered = weakref.ref(latest)
        latest.called.add(place.number)
        return latest

    def report(self) -> dict[str, Any]:
        """What moved, and how well it came back in time. Does not block the host.

        Returns:
            Of the latest forward of each layer, by its name: `moved_bytes_by_layer`, and
            `kept_bytes_by_layer` of what stayed on the device; `moved_bytes` and `kept_bytes` are
            their sums. Since the feature was turned on: `prefetch_hits` and `prefetch_misses` count
            moved storages that were, or were not, on their way when backward came to their layer,
            and `hit_rate` is the share of the former (None before the first); `exposed_waits` and
            `exposed_ms` say how often, and for how many milliseconds in all, the device waited for
            a copy, as far as the device has come; `in_vain_bytes` were copied to the host though
            somebody else held them on the device until backward came; `over_budget_bytes` stayed
            since the host had no room. Of the host memory: `host_reserved_bytes` and
            `host_peak_bytes`. And `modules`, `layers` and `recomputed`, the names.
        """
        self._traffic.read_times()
        counts, stats = self._traffic.counts, self._pool.stats()
        tallies = [self._traffic.latest.get(n, Tally()) for n in range(len(self._layers))]
        asked = counts.hits + counts.misses
        return {
            "modules": list(self._modules),
            "layers": list(self._layers),
            "recomputed": list(self._recomputed),
            "moved_bytes": sum(tally.moved for tally in tallies),
            "moved_bytes_by_layer": {
                name: tally.moved for name, tally in zip(self._layers, tallies, strict=True)
            },
            "kept_bytes": sum(tally.kept for tally in tallies),
            "kept_bytes_by_layer": {
                name: tally.kept for name, tally in zip(self._layers, tallies, strict=True)
            },
            "prefetch_hits": counts.hits,
            "prefetch_misses": counts.misses,
            "hit_rate": counts.hits / asked if asked else None,
            "exposed_waits": counts.waits,
            "exposed_ms": counts.waited_ms,
            "in_vain_bytes": counts.in_vain_bytes,
            "over_budget_bytes": counts.over_budget_bytes,
            "host_reserved_bytes": stats.reserved_bytes,
            "host_peak_bytes": stats.peak_in_use_bytes,
        }

    def remove(self) -> None:
        """Call the modules as ever. Graphs that were made before can still run backward."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def swap_attention(
    model: nn.Module,
    config: SwapAttentionConfig | None = None,
    *,
    pool: PinnedPool | None = None,
) -> AttentionSwap:
    """Move what attention saves for backward to the host, and bring it back in time.

    While a chosen module runs forward in training, each activation that it saves is copied to
    page-locked host memory on a stream of its own, and its device memory is free as soon as it was
    read. Backward finds it on the device again: the layer before the one that it is in is copied
    back meanwhile, on another stream. Loss, gradients and weights are equal to the plain run, bit
    for bit. Under `no_grad`, in `eval()` and while a backward runs (inside a checkpoint) nothing
    moves. Parameters and buffers never move.

    Args:
        model: Any module. In pipeline parallelism apply it to each stage.
        config: The options; the defaults when left out.
        pool: Host memory that is shared with other features, instead of a pool of its own.

    Returns:
        A handle: `report()` says what moved and whether it came in time, `remove()` undoes.

    Raises:
        ConfigError: When no module has a name or type that was asked for, when there are fewer
            layers than were asked for, or when `keep_last` leaves nothing to move.

    Example:
        >>> handle = swap_attention(model, SwapAttentionConfig(swap_modules="self_attention"))
        >>> model(batch).backward()
    """
    config = chosen_config("swap_attention", SwapAttentionConfig, config)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"swap_attention was given a {type(model).__name__}.",
            why="it works on modules.",
            instead="build the model first, and pass it.",
        )
    if pool is not None and config.host_budget is not None:
        raise ConfigError(
            "host_budget was given beside a pool.",
            why="a pool has a budget of its own.",
            instead="leave one of them out.",
        )
    swapped = _swapped(model, config)
    recomputed = _recomputed(model, config.recompute_num_layers)
    memory = PinnedPool(config.host_budget) if pool is None else pool
    return AttentionSwap(model, swapped, recomputed, config, memory)


def _swapped(model: nn.Module, config: SwapAttentionConfig) -> Named:
    if config.names is not None:
        return named(model, config.names)
    modules = model.named_modules()
    called = {name.rpartition(".")[2] for name, module in modules if is_called(module)}
    if "self_attention" in called:
        return named(model, [name for name in _NAMES if name in called])
    return find_attentions(model)


def _recomputed(model: nn.Module, count: int | None) -> Named:
    """The MLPs of the first layers, by qualified name."""
    if count is None:
        return {}
    stack = find_stack(model)
    layers = {} if stack is None else stack.layers
    if stack is None or count > len(layers):
        raise ConfigError(
            f"recompute_num_layers is {count}, and there are {len(layers)} layers.",
            why="they are counted from the first, in this pipeline stage.",
            instead=f"use a number from 1 to {len(layers)}, or None." if layers else "use None.",
        )
    mlps = find_mlps(model)
    inside = tuple(f"{name}." for name in first_layers(stack, range(count)))
    return {name: module for name, module in mlps.items() if name.startswith(inside)}


def _layers(model: nn.Module, chosen: Named) -> dict[str, str]:
    """The layer of each chosen module, by name and in the order of the model.

    A module outside of the stack of layers is a layer of its own.
    """
    stack = find_stack(model)
    found = {}
    for name, _ in model.named_modules():
        if name in chosen:
            position = None if stack is None else stack.position(name)
            found[name] = name if stack is None or position is None else [*stack.layers][position]
    return found


def _check_keep_last(keep_last: int | None, layers: int) -> None:
    if keep_last is not None and keep_last >= layers:
        raise ConfigError(
            f"keep_last is {keep_last}, and activations of {layers} layers are to move.",
            why="those of the last ones stay on the device, so nothing would move.",
            instead=f"use a number below {layers}, or leave the feature off.",
        )


def _call(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def _recomputing(module: nn.Module) -> Run:
    """Calls of a module that run again in backward, under the random states that it had."""
    note = context_maker(module.modules(), None)

    def run(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = note() or contextlib.nullcontext
        first, names = len(args), tuple(kwargs)  # what runs again may not hold the values

        def again(*values: Any) -> Any:
            return call(*values[:first], **dict(zip(names, values[first:], strict=True)))

        # It saves its inputs outside of its own hooks, so that they move; but not those that it is
        # itself given by name.
        return checkpoint(
            again,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), context()),
        )

    return run
