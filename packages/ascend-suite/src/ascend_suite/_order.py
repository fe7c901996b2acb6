"""In which order features are turned on: data, with the reason for each place. Imports no torch.

They are turned off in the reverse order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ascend_core.feature import Feature

__all__ = ["ORDER", "Place", "in_order", "takes_chunks"]


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a feature in the order.

    Attributes:
        feature: Its name.
        because: Why it comes behind those before it.
        takes_chunks: Whether it takes the list of model chunks of a pipeline stage.
    """

    feature: str
    because: str
    takes_chunks: bool = False


ORDER = (
    Place(
        "fused-ops",
        "It decides which operators a module calls. What recomputes or moves watches the operators "
        "that are really called.",
    ),
    Place(
        "recompute-layers",
        "The other recomputes count their layers behind those that are recomputed whole, and leave "
        "these alone: a layer is never both.",
    ),
    Place(
        "recompute-activation",
        "What it rebuilds is neither held nor moved, so it comes before what moves.",
    ),
    Place(
        "recompute-norm",
        "As recompute-activation. The two claim different values, and could change places.",
    ),
    Place(
        "swap-attention",
        "Of what is left it moves what attention saves: nothing that is rebuilt, and nothing in "
        "layers that are recomputed whole.",
    ),
    Place(
        "reduce-gradients",
        "It gives all ranks the weights of the first one, of which whatever works on the optimizer "
        "may make masters.",
        takes_chunks=True,
    ),
    Place(
        "shard-optimizer",
        "It divides parameters along the buckets of reduce-gradients. What else works on the "
        "optimizer works on this rank's part of them.",
    ),
    Place(
        "swap-optimizer",
        "It moves the state of whatever is stepped at last: a shard where there is one.",
    ),
    Place("reuse-fp32-param", "As swap-optimizer."),
)


def in_order(features: Iterable[Feature]) -> list[Feature]:
    """Sort features as they are to be turned on.

    Those that the table does not know come behind those of the same target that it knows, in the
    order that they were given in.
    """
    places = {place.feature: number for number, place in enumerate(ORDER)}
    behind = {"model": places["reduce-gradients"] - 0.5, "optimizer": float(len(ORDER))}
    return sorted(features, key=lambda one: places.get(one.name, behind[one.target]))


def takes_chunks(name: str) -> bool:
    """Whether the feature of this name takes a list of model chunks."""
    return any(place.feature == name and place.takes_chunks for place in ORDER)
