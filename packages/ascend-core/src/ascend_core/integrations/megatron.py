"""The random states that megatron-core keeps beside torch's. Importing it imports megatron-core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

__all__ = ["random_states"]


def random_states() -> Callable[[], AbstractContextManager[None]]:
    """Note the states of megatron-core's tracker, from which dropout in attention draws.

    Verbs that run a module twice do so by themselves for models of megatron-core. Give the result
    to `CheckpointWithoutOutput(context_fn=random_states())`, made in each forward, where the
    function draws from the tracker.

    Returns:
        A function that makes a context with these states. The tracker is afterwards as before.
    """
    noted = _copy(get_cuda_rng_tracker().get_states())

    @contextlib.contextmanager
    def bring_back() -> Iterator[None]:
        tracker = get_cuda_rng_tracker()
        ambient = tracker.get_states()
        tracker.set_states(_copy(noted))  # it writes into them, and there may be another replay
        try:
            yield
        finally:
            tracker.set_states(ambient)

    return bring_back


def _copy(states: dict[str, Any]) -> dict[str, Any]:
    """The states, so that a draw from the originals leaves them as they are.

    A state is a tensor that is replaced by every draw or, where the tracker works under CUDA
    graphs, a generator that is drawn from.
    """
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }
