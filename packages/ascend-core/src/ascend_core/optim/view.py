"""What a windowed optimizer shows as its state."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

import torch

from ascend_core.errors import FeatureError

__all__ = ["StateView"]


class StateView(defaultdict[torch.Tensor, Any]):
    """A picture of the state, by parameter. The tensors are live; the mapping takes no change."""

    def __init__(self, items: Any) -> None:
        super().__init__(dict, items)

    def __missing__(self, key: torch.Tensor) -> dict[str, Any]:
        return {}

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FeatureError(
            "the state of a windowed optimizer cannot be replaced entry by entry.",
            why="what is shown is made anew each time it is read, so a change would be lost.",
            instead="write into its tensors, or change a state_dict() and load it.",
        )

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = _refuse
