"""State that a model's library keeps beside torch's, and that a replay has to bring back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from ascend_core.modes import ContextFactory

__all__ = ["context_maker"]


def context_maker(
    modules: Iterable[nn.Module], context_fn: ContextFactory | None
) -> Callable[[], ContextFactory | None]:
    """What to call in each forward for the context of its replay.

    [Note: dropout that draws from generators of megatron-core's own]
    Its attention draws from a tracker of random states, one for each kind of parallelism. Torch's
    generators are brought back for a replay, and would be swapped for a state of the tracker that
    is further on by then: another mask, and a wrong gradient without an error.

    Args:
        modules: What is replayed.
        context_fn: The user's own.
    """
    if not any(_is_of_megatron(module) for module in modules):
        return lambda: context_fn
    from ascend_core.integrations.megatron import random_states

    if context_fn is None:
        return random_states

    def both() -> ContextFactory:
        bring_back = random_states()

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with bring_back(), context_fn():
                yield

        return context

    return both


def _is_of_megatron(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("megatron.core.") for kind in type(module).__mro__)
