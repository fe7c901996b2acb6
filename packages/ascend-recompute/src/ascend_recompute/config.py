"""What the features of this package can be told. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from ascend_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ascend_recompute.policy import Policy

__all__ = [
    "RebuildConfig",
    "RecomputeActivationConfig",
    "RecomputeLayersConfig",
    "RecomputeNormConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RebuildConfig:
    """Options that the verbs which rebuild values share.

    Attributes:
        modules: The modules whose values are rebuilt: qualified names ("blocks.0.mlp"), attribute
            names ("mlp") or module types.
        layers: In which layers, by position from 0 in the order of the model. By default in all.
        num_layers: In how many layers, counted from the first that is not fully recomputed.
            Instead of `layers`.
        policy: Which operators may be run again (`ascend_recompute.policy`).
        verify: Compare each rebuilt value with the forward's, and raise when they differ. For
            debugging: reads every value twice more.
    """

    modules: Sequence[str | type[nn.Module]] | None = None
    layers: Sequence[int] | None = None
    num_layers: int | None = None
    policy: Policy | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: When a value cannot be right whatever the model is.
        """
        _check_modules(self.modules)
        _check_layers(self.layers)
        if self.num_layers is not None:
            _check_count("num_layers", self.num_layers)
            if self.layers is not None:
                raise ConfigError(
                    "layers and num_layers are both given.",
                    why="each says which layers are meant.",
                    instead="give one of them.",
                )
        _check_flag("verify", self.verify)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputeActivationConfig(RebuildConfig):
    """Options of `recompute_activation`.

    Attributes:
        modules: The modules whose activation functions are rebuilt: qualified names
            ("blocks.0.mlp"), attribute names ("mlp") or module types. By default every module
            that looks like an MLP, by its name or by what it is made of.
        layers: In which layers, by position from 0 in the order of the model. By default in all.
        num_layers: In how many layers, counted from the first that is not fully recomputed.
            Instead of `layers`.
        policy: Which operators may be run again (`ascend_recompute.policy`). By default
            activation functions, elementwise arithmetic, casts and dropout.
        verify: Compare each rebuilt value with the forward's, and raise when they differ. For
            debugging: reads every value twice more.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputeNormConfig(RebuildConfig):
    """Options of `recompute_norm`.

    Attributes:
        modules: The norms whose outputs are rebuilt: qualified names ("blocks.0.norm"), attribute
            names ("norm") or module types. By default every module whose class is called
            LayerNorm or RMSNorm, or like one ("LlamaRMSNorm").
        layers: In which layers, by position from 0 in the order of the model; all norms of a layer
            count. By default in all, and those outside of any layer.
        num_layers: In how many layers, counted from the first that is not fully recomputed.
            Instead of `layers`.
        policy: Which operators may be run again (`ascend_recompute.policy`). By default norms,
            elementwise arithmetic and casts.
        verify: Compare each rebuilt value with the forward's, and raise when they differ. For
            debugging: reads every value twice more.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecomputeLayersConfig:
    """Options of `recompute_layers`.

    Attributes:
        method: "block" recomputes the first `num_layers` layers, each on its own: what is held is
            their inputs. "uniform" recomputes all layers in groups of `num_layers`: what is held
            is the input of each group, and a group's backward holds what the whole group saves.
        num_layers: How many layers (block) or layers per group (uniform). By default all layers
            (block), groups of one (uniform).
        layers: Which layers, by position from 0, instead of the first `num_layers`; block only.
        stack: The qualified name of the container of layers. By default the ModuleList (or
            Sequential of equal modules) that holds most of the model's parameters.
        context_fn: Makes a context to enter when a layer runs again, for modes that are not known
            here (a quantisation recipe, say).
        early_stop: End a layer's second run as soon as it has saved what backward needs, in most
            layers before their last matrix product. Only for layers that need no end: what they
            set and put back afterwards they must put back in a `finally`, and not in a forward
            hook. The layers of a group (uniform) run to their end, but for the last one.
        verify: Compare each tensor that a replayed layer saves with the forward's, and raise when
            they differ. For debugging: reads every tensor twice more.
    """

    method: Literal["block", "uniform"] = "block"
    num_layers: int | None = None
    layers: Sequence[int] | None = None
    stack: str | None = None
    context_fn: Callable[[], AbstractContextManager[Any]] | None = None
    early_stop: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: When a value cannot be right whatever the model is.
        """
        if self.method not in ("block", "uniform"):
            raise ConfigError(
                f"method is {self.method!r}.",
                why="layers are recomputed one by one, or in groups of equal size.",
                instead='write "block" or "uniform".',
            )
        if self.num_layers is not None:
            _check_count("num_layers", self.num_layers)
        _check_layers(self.layers)
        if self.layers is not None and (self.num_layers is not None or self.method != "block"):
            raise ConfigError(
                "layers is given beside num_layers, or with the method uniform.",
                why="it names the layers that are recomputed one by one.",
                instead='give layers alone, or num_layers, or method="uniform" with num_layers.',
            )
        _check_flag("early_stop", self.early_stop)
        _check_flag("verify", self.verify)


def _check_modules(modules: object) -> None:
    if isinstance(modules, (str, type)):
        raise ConfigError(
            f"modules is {modules!r}, which is one module.",
            why="a sequence of names or types is wanted.",
            instead=f"write modules=({modules!r},)."
            if isinstance(modules, str)
            else f"write modules=({modules.__name__},).",
        )
    if modules is None:
        return
    if not isinstance(modules, Sequence):
        raise ConfigError(
            f"modules is {modules!r}.",
            why="a sequence of names or types is wanted.",
            instead='write for example modules=("mlp",).',
        )
    for module in modules:
        if not isinstance(module, (str, type)):
            raise ConfigError(
                f"modules holds {module!r}.",
                why="modules are selected by name or by type.",
                instead="name the module as model.named_modules() does, or pass its class.",
            )
    if not modules:
        raise ConfigError("modules is empty.", instead="leave it out to take every one.")


def _check_layers(layers: object) -> None:
    if layers is None:
        return
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise ConfigError(
            f"layers is {layers!r}.",
            why="a sequence of positions is wanted.",
            instead="write for example layers=range(4).",
        )
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ConfigError(
                f"layers holds {layer!r}.",
                why="layers are positions counted from 0.",
                instead="write for example layers=range(4).",
            )


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} is {value!r}.",
            why="it is a number of layers.",
            instead="use a whole number above 0, or leave the feature off.",
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}.", instead="write True or False.")
