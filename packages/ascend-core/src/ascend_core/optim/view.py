"""What a windowed optimizer shows as its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any, NoReturn

import torch

from ascend_core.errors import FeatureError

__all__ = ["Entries", "StateView"]


class _TakesNoChange:
    """What is refused of a dictionary that is only a picture."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FeatureError(
            "the state of a windowed optimizer cannot be replaced entry by entry.",
            why="what is shown is made anew each time it is read, so a change would be lost.",
            instead="write into its tensors, or change a state_dict() and load it.",
        )

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse


class Entries(_TakesNoChange, dict[str, torch.Tensor]):
    """What is kept for one parameter, by name. The tensors are live; it takes no change itself."""

    def __reduce__(self) -> tuple[type, tuple[dict[str, torch.Tensor]]]:
        """A copy is a dictionary like any other."""
        return dict, (dict(self),)


class StateView(_TakesNoChange, defaultdict[torch.Tensor, Any]):
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
            return Entries()
        found: dict[str, Any] | None = super().__getitem__(key)
        if found is None:
            found = self._read(key)
            dict.__setitem__(self, key, found)
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
