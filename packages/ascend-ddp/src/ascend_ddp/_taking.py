"""Whether this feature can have the gradient of a parameter."""

from __future__ import annotations

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.takers import Taker, takers_of

__all__ = ["REDUCING", "refuse_taken"]

REDUCING = Taker(
    "reduce_gradients",
    does="sends each gradient to the other ranks, in a bucket that waits for it",
    instead="remove() that handle first",
)


def refuse_taken(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose gradient something takes in backward already.

    Args:
        name: Of the parameter, for the error.
        parameter: It.

    Raises:
        ConfigError: When another handle of this feature does, or another feature.
    """
    takers = takers_of(parameter)
    if REDUCING in takers:
        raise ConfigError(
            f"the gradient of {name} is reduced already.",
            why="another handle of reduce_gradients watches it.",
            instead="turn the feature on once, for the outermost module, or call remove() first.",
        )
    for other in takers:
        raise ConfigError(
            f"the gradient of {name} is taken by {other.verb}.",
            why=f"that {other.does}, and what is not in its bucket is never sent: the other ranks "
            "would wait for it.",
            instead=f"{other.instead}.",
        )
