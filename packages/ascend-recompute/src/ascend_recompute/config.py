"""What the features of this package can be told. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ascend_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ascend_recompute.policy import Policy

__all__ = ["RecomputeActivationConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputeActivationConfig:
    """Options of `recompute_activation`.

    Attributes:
        modules: The modules whose activation functions are rebuilt: qualified names
            ("blocks.0.mlp"), attribute names ("mlp") or module types. By default every module
            that looks like an MLP, by its name or by what it is made of.
        layers: Which of those modules, by position from 0 in the order of the model. By default
            all.
        policy: Which operators may be run again (`ascend_recompute.policy`). By default
            activation functions, elementwise arithmetic, casts and dropout.
    """

    modules: Sequence[str | type[nn.Module]] | None = None
    layers: Sequence[int] | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: When a value cannot be right whatever the model is.
        """
        if isinstance(self.modules, (str, type)):
            raise ConfigError(
                f"modules is {self.modules!r}, which is one module.",
                why="a sequence of names or types is wanted.",
                instead=f"write modules=({self.modules!r},)."
                if isinstance(self.modules, str)
                else f"write modules=({self.modules.__name__},).",
            )
        for module in self.modules or ():
            if not isinstance(module, (str, type)):
                raise ConfigError(
                    f"modules holds {module!r}.",
                    why="modules are selected by name or by type.",
                    instead="name the module as model.named_modules() does, or pass its class.",
                )
        if self.modules is not None and not self.modules:
            raise ConfigError("modules is empty.", instead="leave it out to take every MLP.")
        if self.layers is not None and not isinstance(self.layers, Sequence):
            raise ConfigError(
                f"layers is {self.layers!r}.",
                why="a sequence of positions is wanted.",
                instead="write for example layers=range(4).",
            )
        for layer in self.layers if self.layers is not None else ():
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise ConfigError(
                    f"layers holds {layer!r}.",
                    why="layers are positions counted from 0.",
                    instead="write for example layers=range(4).",
                )
