"""Turning swap-attention on by the spec that a model is built from.

[Note: layers that tell that they were built]
A spec names the class of a layer. The returned one names a subclass, whose instances are of the
spec's own class as soon as they have been built: all that the subclass does is to tell. The layers
are known one by one then, and how many come is not. So the feature is turned on when the first of
them is called: for all that were built so far from this spec in this process, which in virtual
pipelining are the layers of every model chunk. One feature sees them all, and learns the order in
which the schedule runs the chunks.
"""

from __future__ import annotations

import copy
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.pinned import PinnedPool
from ascend_core.scope import AroundCall, around_call
from ascend_swap.attention import AttentionSwap, swap_attention
from ascend_swap.config import SwapAttentionConfig

__all__ = ["SwapBySpec", "with_swapped_attention"]


class SwapBySpec:
    """The handle of `with_swapped_attention`.

    Args:
        config: The options.
        pool: Host memory that is shared with other features.
    """

    def __init__(self, config: SwapAttentionConfig | None, pool: PinnedPool | None) -> None:
        self._config = config
        self._pool = pool
        self._lock = threading.Lock()
        self._built: list[weakref.ref[nn.Module]] = []  # and not called yet
        self._arounds: list[AroundCall] = []
        self._handles: list[AttentionSwap] = []
        self._removed = False

    def report(self) -> dict[str, Any]:
        """What moved in the model that was built last from the spec; see `AttentionSwap.report`.

        The names begin with the number of the layer, counted in this pipeline stage from 0.

        Raises:
            ConfigError: When no layer was built yet, or as `swap_attention`.
        """
        self._turn_on()
        if not self._handles:
            raise ConfigError(
                "no layer was built from the spec of swap_attention.",
                why="the layers are known when the model is built.",
                instead="build the model from the returned spec, and ask then.",
            )
        return self._handles[-1].report()

    def remove(self) -> None:
        """Call all layers as ever, also those that are still to be built."""
        with self._lock:
            self._removed = True
            self._built.clear()
            for around in self._arounds:
                around.remove()
            self._arounds.clear()
            for handle in self._handles:
                handle.remove()

    def built(self, layer: nn.Module) -> None:
        """A layer was built from the spec."""
        with self._lock:
            if not self._removed:
                self._built.append(weakref.ref(layer))
                self._arounds.append(around_call(layer, self._called, self))

    def _called(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._turn_on()
        return call(*args, **kwargs)

    def _turn_on(self) -> None:
        """Swap the attention of the layers that were built, unless it is done."""
        with self._lock:
            layers = [layer for reference in self._built if (layer := reference()) is not None]
            if layers:
                stage = nn.ModuleList(layers)
                self._handles.append(swap_attention(stage, self._config, pool=self._pool))
            for around in self._arounds:
                around.remove()
            self._arounds.clear()
            self._built.clear()


def with_swapped_attention(
    spec: ModuleSpec | TransformerBlockSubmodules,
    config: SwapAttentionConfig | None = None,
    *,
    pool: PinnedPool | None = None,
) -> tuple[ModuleSpec | TransformerBlockSubmodules, SwapBySpec]:
    """A layer's spec whose self-attention is swapped, for where a framework builds the model.

    On a model that is built, `swap_attention` and `swap_by_options` do the same. What is built is
    of the spec's own classes, with the same parameters and state dict.

    Args:
        spec: Of a transformer layer, or of a block of layers. Stays as it is.
        config: The options; the defaults when left out. Layers are counted in the pipeline stage,
            over all of its model chunks.
        pool: Host memory that is shared with other features, instead of a pool of its own.

    Returns:
        The spec to build the model from, and a handle: `report()` says what moved and whether it
        came in time, `remove()` undoes.

    Raises:
        ConfigError: When the spec is not one of transformer layers. What else `swap_attention`
            refuses is refused when the first layer is called, or in `report()`.

    Example:
        >>> spec, handle = with_swapped_attention(get_gpt_layer_local_spec())
        >>> model = GPTModel(config, spec, vocabulary, sequence)
    """
    handle = SwapBySpec(config, pool)
    if not isinstance(spec, TransformerBlockSubmodules):
        return _telling_spec(spec, handle), handle
    block = copy.copy(spec)
    block.layer_specs = [_telling_spec(layer, handle) for layer in spec.layer_specs or []]
    return block, handle


def _telling_spec(spec: ModuleSpec, handle: SwapBySpec) -> ModuleSpec:
    layer = get_module(spec) if isinstance(spec, ModuleSpec) else spec
    if not (
        isinstance(layer, type)
        and issubclass(layer, BaseTransformerLayer)
        and hasattr(getattr(spec, "submodules", None), "self_attention")
    ):
        raise ConfigError(
            f"the spec builds {getattr(layer, '__name__', layer)}.",
            why="attention is swapped in transformer layers that have a self_attention.",
            instead="pass the spec of a layer, or of a block of layers, or call swap_attention on "
            "the model.",
        )
    telling = copy.copy(spec)
    telling.module = _telling(layer, handle.built)
    return telling


def _telling(base: type[Any], tell: Callable[[nn.Module], None]) -> type[Any]:
    """A subclass of a layer's class whose instances are of that class once they are built."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **kwargs)
        self.__class__ = base
        tell(self)

    body = {"__init__": __init__, "__module__": base.__module__, "__doc__": base.__doc__}
    return types.new_class(base.__name__, (base,), exec_body=lambda names: names.update(body))
