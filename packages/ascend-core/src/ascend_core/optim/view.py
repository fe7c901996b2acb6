"""What a windowed optimizer shows as its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any, NoReturn

import torch

from ascend_core.errors import FeatureError

__all__ = ["StateView"]


class StateView(defaultdict[torch.Tensor, Any]):
    """A picture of the state, by parameter. The tensors are live; the mapping takes no change.

    What is kept for a parameter is put together when it is first read, and for that one alone:
    where masters live in the bits of their weights, to look at one does not join them all.

    Args:
        parameters: Those that have state.
        read: Gives the state of one.
    """

    # The dictionary beneath holds None for what was not read yet, so whatever reads values goes
    # through `__getitem__`.

    def __init__(
        self, parameters: Iterable[torch.Tensor], read: Callable[[torch.Tensor], dict[str, Any]]
    ) -> None:
        super().__init__(dict, dict.fromkeys(parameters))
        self._read = read

    def __getitem__(self, key: torch.Tensor) -> dict[str, Any]:
        if key not in self:
            return {}
        found: dict[str, Any] | None = super().__getitem__(key)
        if found is None:
            found = self._read(key)
            super().__setitem__(key, found)
        return found

    def __iter__(self) -> Iterator[torch.Tensor]:
        return super().__iter__()  # being here, it keeps dict(view) from copying what is beneath

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        """See `dict.get`."""
        if key not in self:
            return default
        return self[key]

    def items(self) -> Any:
        """See `dict.items`."""
        return ItemsView(self)

    def values(self) -> Any:
        """See `dict.values`."""
        return ValuesView(self)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FeatureError(
            "the state of a windowed optimizer cannot be replaced entry by entry.",
            why="what is shown is made anew each time it is read, so a change would be lost.",
            instead="write into its tensors, or change a state_dict() and load it.",
        )

    __setitem__ = __delitem__ = pop = popitem = clear = update = setdefault = _refuse
