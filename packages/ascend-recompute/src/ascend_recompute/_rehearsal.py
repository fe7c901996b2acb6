"""Forwards of one sample that are measured, and leave the model as it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ascend_core.device import backend_of, device_of
from ascend_core.errors import ConfigError
from ascend_core.memory import measure_peak
from ascend_core.memory._graph import graph_nodes, saved_by
from ascend_core.rng import RngState
from ascend_core.saved import Packed
from ascend_recompute._recipe import Rebuild
from ascend_recompute._replay import Slot

Forward = Callable[[nn.Module, Any], Any]


class Held(NamedTuple):
    """What one forward left behind.

    Attributes:
        nbytes: Bytes in use after it, less those before it.
        outputs: The tensors with a graph that it returned.
    """

    nbytes: int
    outputs: list[Tensor]


class Rehearsal:
    """Runs one forward again and again, from the same random state.

    Attributes:
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, sample: Any, forward: Forward, rng: RngState) -> None:
        self.device = device_of(model)
        self._model = model
        self._sample = sample
        self._forward = forward
        self._rng = rng

    def run(self) -> Held:
        """Run forward and measure what is held while its result is alive.

        Raises:
            ConfigError: When nothing that it returns requires grad.
        """
        self._rng.restore()
        torch.clear_autocast_cache()  # casts of weights that an earlier run left are held by none
        with measure_peak(self.device) as memory, torch.enable_grad():
            result = self._forward(self._model, self._sample)
        leaves = pytree.tree_leaves(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not outputs:
            raise ConfigError(
                f"the forward returned a {type(result).__name__} in which no tensor requires grad.",
                why="then nothing is held for a backward, and nothing can be measured.",
                instead="pass forward=, a function of model and sample that returns the loss.",
            )
        return Held(memory.held_bytes, outputs)

    def seconds(self, outputs: list[Tensor], repeats: int) -> dict[str, float]:
        """Ask for each value that is not held, in the order of backward, and time that.

        Makes the device synchronise with the host before and after each value.

        Args:
            outputs: Tensors whose graphs are asked; no backward runs.
            repeats: How often all values are asked for. The shortest time of each one counts:
                whatever else the machine does can only add to it.

        Returns:
            For each module that is computed again the seconds it takes.
        """
        nodes = sorted(graph_nodes(outputs), key=lambda node: -node._sequence_nr())
        asked = [pair for saved in saved_by(nodes) for pair in _asked(saved.value)]
        times = [[self._timed(ask) for _, ask in asked] for _ in range(repeats)]
        spent: dict[str, float] = {}
        for (label, _), of_one in zip(asked, zip(*times, strict=True), strict=True):
            spent[label] = spent.get(label, 0.0) + min(of_one)
        return spent

    def _timed(self, ask: Callable[[], object]) -> float:
        synchronize = backend_of(self.device).synchronize
        synchronize(self.device)
        started = time.perf_counter()
        ask()
        synchronize(self.device)
        return time.perf_counter() - started


@contextlib.contextmanager
def rehearsal(model: nn.Module, sample: Any, forward: Forward | None) -> Iterator[Rehearsal]:
    """Measure forwards inside the block; random state and buffers are then as they were.

    Args:
        model: On one device.
        sample: What `forward` gets.
        forward: Called with model and sample; the plain call of the model when left out.

    Yields:
        The rehearsal. No backward runs, so gradients and gradient hooks are left alone.
    """
    rng = RngState.capture([device_of(model)])
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield Rehearsal(model, sample, forward or call_of(sample), rng)
    finally:
        rng.restore()
        for module, name, buffer, before in buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if buffer is not None and before is not None and not torch.equal(buffer, before):
                with torch.no_grad():
                    buffer.copy_(before)


def call_of(sample: Any) -> Forward:
    """How a model is called with a sample: by position, or by keyword.

    Raises:
        ConfigError: When the sample does not say.
    """
    if isinstance(sample, Tensor):
        return lambda model, sample: model(sample)
    if isinstance(sample, Mapping):
        return lambda model, sample: model(**sample)
    if isinstance(sample, (tuple, list)):
        return lambda model, sample: model(*sample)
    raise ConfigError(
        f"the sample is a {type(sample).__name__}.",
        why="the model is called with a tensor, with a tuple as its positional arguments, or with "
        "a dict as its keyword arguments.",
        instead="pass one of those, or forward=, a function of model and sample.",
    )


def _asked(packed: object) -> Iterator[tuple[str, Callable[[], object]]]:
    """Who computes it again and how to ask, when a saved tensor is not held."""
    if isinstance(packed, Slot):
        yield packed.replay.label, lambda: packed.replay.take(packed)
    elif isinstance(packed, Packed) and isinstance(packed.claim, Rebuild):
        yield packed.claim.recipe.label, packed.get
