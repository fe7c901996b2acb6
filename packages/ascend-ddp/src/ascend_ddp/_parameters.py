"""The parameters of a model chunk, which does not live longer for being in this list.

[Note: who keeps whom]
A hook of a parameter keeps the reducer, as long as the parameter lives, and so as long as the model
does. Torch keeps the hooks of a tensor where Python's collector of cycles cannot look. So a reducer
that kept its parameters would never be freed, nor would they.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

__all__ = ["Parameters", "lists_plainly"]

_LISTING = ("parameters", "named_parameters", "named_modules")


class Parameters:
    """Parameters by number, weakly. One that has died is empty, and requires no gradient.

    Args:
        named: Them, by name.

    Attributes:
        names: Of all.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.names = list(named)
        self._all = [weakref.ref(parameter) for parameter in named.values()]
        self._number_of = {id(parameter): n for n, parameter in enumerate(named.values())}
        self._none = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)

    def __contains__(self, parameter: object) -> bool:
        number = self._number_of.get(id(parameter))  # that of one that has died may come again
        return number is not None and self._all[number]() is parameter

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> nn.Parameter:
        parameter = self._all[index]()
        return self._none if parameter is None else parameter

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (self[index] for index in range(len(self)))

    def are_all_of(self, module: nn.Module) -> bool:
        """Whether no other parameter that requires a gradient is in a module, or in one inside it.

        Every backward asks. So it makes neither the names nor the generators of `parameters()`.

        Args:
            module: One that `lists_plainly`.
        """
        number_of, references = self._number_of, self._all
        left, seen = [module], {module}
        while left:
            one = left.pop()
            for parameter in one._parameters.values():
                if parameter is None:
                    continue
                number = number_of.get(id(parameter))
                is_known = number is not None and references[number]() is parameter
                if not is_known and parameter.requires_grad:
                    return False
            for inner in one._modules.values():
                if inner is not None and inner not in seen:
                    seen.add(inner)
                    left.append(inner)
        return True

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each with its name."""
        return zip(self.names, self, strict=True)


def lists_plainly(module: nn.Module) -> bool:
    """Whether `module.parameters()` yields what torch's own does: no class in it has another."""
    return all(
        getattr(type(one), name) is getattr(nn.Module, name)
        for one in module.modules()
        for name in _LISTING
    )
