"""Noticing that a model has other parameters than those that its optimizer knows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ascend_core.errors import ConfigError

__all__ = ["ModelWatch"]


class _Holder(NamedTuple):
    """Where a parameter is in its model."""

    name: str
    module: nn.Module
    attribute: str


class ModelWatch:
    """Compares, by identity, the parameters of a model with those of an optimizer.

    Args:
        model: The model.
        groups: `param_groups` of its optimizer.
    """

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]]) -> None:
        wanted = {id(parameter) for group in groups for parameter in group["params"]}
        self._held: list[tuple[_Holder, torch.Tensor]] = [
            (_Holder(f"{prefix}.{name}".lstrip("."), module, name), parameter)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in wanted
        ]

    def update(self, groups: list[dict[str, Any]]) -> None:
        """Put the parameters that the model has now where those that it had are in the groups.

        Raises:
            ConfigError: When a parameter that was shared by several modules no longer is.
        """
        now = [
            (holder, holder.module._parameters.get(holder.attribute)) for holder, _ in self._held
        ]
        new: dict[int, torch.Tensor] = {}
        for (holder, old), (_, found) in zip(self._held, now, strict=True):
            if found is not None and new.setdefault(id(old), found) is not found:
                raise ConfigError(
                    f"{holder.name} was shared with another module, and is not any more.",
                    why="the model was given new parameters, one for each name, as "
                    "load_state_dict(assign=True) does; the optimizer has one for both.",
                    instead="tie them again after loading, or load with assign=False.",
                )
        if all(new.get(id(old), old) is old for _, old in self._held):
            return
        for group in groups:
            group["params"][:] = [new.get(id(old), old) for old in group["params"]]
        self._held = [(holder, new.get(id(old), old)) for holder, old in self._held]
