"""What a feature is: a frozen config, a verb that applies it, a handle that reports and undoes it.

A package offers its features as entry points of the group `ascend.features`; each entry point
names a `Feature` constant. Neither this module nor the constants import torch: the verb is named
by a string and imported when it is first applied.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from ascend_core.errors import ConfigError, FeatureError, FeatureNotFoundError

__all__ = ["ENTRY_POINT_GROUP", "Feature", "Handle", "chosen_config", "discover", "get_feature"]

ENTRY_POINT_GROUP = "ascend.features"

Config = TypeVar("Config")


@runtime_checkable
class Handle(Protocol):
    """What a verb returns: the feature as it is on."""

    def report(self) -> Mapping[str, Any]:
        """What the feature did since it was applied; byte counts are in bytes."""

    def remove(self) -> None:
        """Undo what the verb did. A second call does nothing."""


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature that an installed package offers.

    Attributes:
        name: The name that users write, e.g. `"recompute-activation"`.
        summary: One line for people who train models: what it saves and what it costs.
        config: The frozen dataclass whose presence turns the feature on.
        verb: Where the verb is, as `"package.module:function"`.
        target: What the verb is applied to.
        bitwise: Whether loss, gradients and weights are promised to equal the plain run's, bit for
            bit.
        moves_to_host: Whether it saves by moving memory to the host: on a CPU, whose memory is the
            host's, it saves nothing.
        needs_bf16: Whether it works on BF16 weights alone.
        needs_ranks: Whether it works between processes of `torch.distributed`.
        takes: The feature whose handle the verb takes between its target and its config; None
            where it takes none.
        wraps: Whether the verb takes `wrap`: what the other features for the optimizer are applied
            to is what this one steps with, and not what it returns.
    """

    name: str
    summary: str
    config: type[Any]
    verb: str
    target: Literal["model", "optimizer"]
    bitwise: bool = True
    moves_to_host: bool = False
    needs_bf16: bool = False
    needs_ranks: bool = False
    takes: str | None = None
    wraps: bool = False

    def apply(
        self,
        target: object,
        config: object | None = None,
        *,
        taken: object | None = None,
        **arguments: object,
    ) -> Handle:
        """Import the verb and apply it.

        Args:
            target: The model or optimizer that the feature works on.
            config: An instance of `self.config`; its defaults when left out.
            taken: The handle of the feature that `takes` names.
            arguments: Keyword arguments that the verb has beside its config.

        Returns:
            The feature's handle.

        Raises:
            ConfigError: When `config` is not an instance of this feature's config class, or `taken`
                is missing, or given to a feature that takes none.
            FeatureError: When the verb cannot be imported.
        """
        chosen = self.config() if config is None else config
        if not isinstance(chosen, self.config):
            raise ConfigError(
                f"{self.name} was given a {type(chosen).__name__}.",
                why=f"its options are a {self.config.__name__}.",
                instead=f"pass {self.config.__name__}(...), or nothing for its defaults.",
            )
        if self.takes is None and taken is not None:
            raise ConfigError(
                f"{self.name} was given a {type(taken).__name__} to take.",
                instead="pass its target and its config alone.",
            )
        if self.takes is not None and taken is None:
            raise ConfigError(
                f"{self.name} was given no handle of {self.takes}.",
                why=f"it works along with {self.takes}, which is to be on before it.",
                instead=f"apply {self.takes} first, and pass its handle as taken=.",
            )
        between = () if taken is None else (taken,)
        return self._load_verb()(target, *between, chosen, **arguments)

    def _load_verb(self) -> Callable[..., Handle]:
        module_name, _, attribute = self.verb.partition(":")
        try:
            verb = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise FeatureError(
                f"{self.name} cannot be loaded from {self.verb!r}.",
                why=str(error),
                instead="reinstall the package that offers it, with its declared dependencies.",
            ) from error
        return cast("Callable[..., Handle]", verb)


def chosen_config(verb: str, kind: type[Config], config: object | None) -> Config:
    """The options of a verb: the config that it was given, or the defaults.

    Args:
        verb: Its name.
        kind: The class of its config.
        config: What it was given; None where that was left out.

    Raises:
        ConfigError: When `config` is of another class.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(
            f"{verb} was given a {type(config).__name__} as its config.",
            instead=f"pass {kind.__name__}(...), or nothing for its defaults.",
        )
    return config


def discover() -> dict[str, Feature]:
    """Find every feature that the installed packages offer.

    Returns:
        The features by name, in the order of their names.

    Raises:
        FeatureError: When an entry point cannot be loaded, is not a `Feature`, or two packages
            offer different features under one name.
    """
    found: dict[str, Feature] = {}
    for entry in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        feature = _load(entry)
        if found.setdefault(feature.name, feature) != feature:
            raise FeatureError(
                f"two installed packages offer a feature called {feature.name!r}.",
                why=f"{found[feature.name].verb!r} and {feature.verb!r} are both registered.",
                instead="uninstall one of the two packages.",
            )
    return found


def get_feature(name: str) -> Feature:
    """Find one feature by name.

    Raises:
        FeatureNotFoundError: When no installed package offers it; the message lists those that
            are there.
    """
    features = discover()
    if name not in features:
        known = ", ".join(features) or "none"
        raise FeatureNotFoundError(
            f"there is no feature called {name!r}.",
            why=f"the installed packages offer: {known}.",
            instead="check the spelling, or install the package that offers it.",
        )
    return features[name]


def _load(entry: metadata.EntryPoint) -> Feature:
    try:
        feature = entry.load()
    except Exception as error:
        raise FeatureError(
            f"the feature {entry.name!r} cannot be loaded from {entry.value!r}.",
            why=f"{type(error).__name__}: {error}",
            instead="reinstall or uninstall the package that registers it.",
        ) from error
    if not isinstance(feature, Feature):
        raise FeatureError(
            f"the entry point {entry.name!r} of the group {ENTRY_POINT_GROUP!r} is no feature.",
            why=f"{entry.value!r} is a {type(feature).__name__}.",
            instead="point it at an ascend_core.feature.Feature.",
        )
    return feature
