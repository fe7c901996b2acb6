"""Whether this feature can have the gradient of a parameter."""

from __future__ import annotations

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.takers import Taker, taker_of

__all__ = ["REDUCING", "refuse_other_taker"]

REDUCING = Taker(
    "reduce_gradients",
    does="sends each gradient to the other ranks, in a bucket that waits for it",
    instead="remove() that handle first",
)


def refuse_other_taker(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose gradient another feature takes in backward.

    Args:
        name: Of the parameter, for the error.
        parameter: It.

    Raises:
        ConfigError: When there is such a feature.
    """
    other = taker_of(parameter, besides=REDUCING)
    if other is None:
        return
    raise ConfigError(
        f"the gradient of {name} is taken by {other.verb}.",
        why=f"that {other.does}, and what is not in its bucket is never sent: the other ranks "
        "would wait for it.",
        instead=f"{other.instead}.",
    )
