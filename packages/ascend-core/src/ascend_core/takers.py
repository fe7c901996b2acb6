"""What takes a parameter's gradient as soon as autograd has accumulated it.

[Note: one taker]
A feature that moves gradients in backward hooks each parameter, and two of them on one parameter
take turns with what only one can have: what has been moved to the host is not in a bucket that is
sent, and ranks would wait for it. Features do not know one another. So the hook of each says what
it does, where the other finds it: on the parameter. Nothing else keeps it, and it is gone with the
hook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

__all__ = ["Taker", "TakingHook", "takers_of"]


@dataclasses.dataclass(frozen=True)
class Taker:
    """What a hook does with gradients, for the error of another feature.

    Attributes:
        verb: Of the feature, with the option that asks for it: what the user wrote.
        does: What becomes of a gradient, as the rest of a sentence about the verb.
        instead: How to do without it, as an imperative.
    """

    verb: str
    does: str
    instead: str


class TakingHook(Protocol):
    """A post-accumulate hook of a parameter that takes the gradient."""

    @property
    def taker(self) -> Taker | None:
        """What it does; None where whom it works for is gone."""


def takers_of(parameter: Tensor) -> tuple[Taker, ...]:
    """What takes the gradient of a parameter, in the order in which it was hooked.

    Args:
        parameter: A leaf.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = (
        getattr(hook, "taker", None)
        for hook in cast("dict[int, Callable[..., Any]]", hooks).values()
    )
    return tuple(taker for taker in found if taker is not None)
