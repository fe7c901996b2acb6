"""A plan from tables: what is right of it, and a finding for each thing that is not.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ascend_core.errors import ConfigError
from ascend_core.feature import discover
from ascend_suite._kinds import fits, frozen, hints_of, in_words, is_code, meant_by, words_of
from ascend_suite._suggestion import listed, nearest
from ascend_suite._tokens import attribute_of
from ascend_suite.finding import Finding, Severity
from ascend_suite.plan import FORMAT, Plan
from ascend_suite.vocabulary import VOCABULARY

__all__ = ["PACKAGES", "PlanReader"]

PACKAGES: Mapping[str, str] = {
    "fused-ops": "ascend-ops",
    "recompute-activation": "ascend-recompute",
    "recompute-layers": "ascend-recompute",
    "recompute-norm": "ascend-recompute",
    "reduce-gradients": "ascend-ddp",
    "reuse-fp32-param": "ascend-reuse-param",
    "shard-optimizer": "ascend-ddp",
    "swap-attention": "ascend-swap",
    "swap-optimizer": "ascend-swap",
}
"""The package that offers each feature of ours, for those that are not installed."""

_FROM_ONE = ("parallel_size", "batch_size", "world_size")
"""How options end of which there is at least one."""

_SWITCHES = ("enable", "enabled", "on", "disable", "disabled")


class PlanReader:
    """Reads tables into a plan, and collects what is wrong with them.

    Attributes:
        found: All findings so far, in the order of reading.
    """

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._features = discover()
        self._hints = {name: hints_of(one.config) for name, one in self._features.items()}

    def plan(self, source: Mapping[Any, object]) -> Plan:
        """Read a whole plan.

        Args:
            source: A table for each feature, `training`, `allow` and `version`.
        """
        features: dict[str, Any] = {}
        training: Mapping[str, object] = {}
        allow: tuple[str, ...] = ()
        for key, value in source.items():
            if key in self._features:
                features.update(self.feature(key, value))
            elif key == "training":
                training = {} if value is None else self.training(value)
            elif key == "allow":
                allow = () if value is None else self.allow(value)
            elif key == "version":
                self._version(value)
            else:
                self._unknown_key(key)
        return Plan(features, training, allow)

    def configs(self, configs: Iterable[object]) -> dict[str, Any]:
        """The features whose configs these are."""
        names = {feature.config: name for name, feature in self._features.items()}
        features: dict[str, Any] = {}
        for config in configs:
            name = names.get(type(config))
            if name is None:
                self._no_config(config, names)
            elif name in features:
                self.error(
                    name,
                    f"{name} is given twice.",
                    "a feature has one config.",
                    f"put all options into one {type(config).__name__}.",
                )
            else:
                features[name] = _frozen_config(config)
        return features

    def feature(self, name: str, table: object) -> dict[str, Any]:
        """The config of one feature, by its name; empty where the table says nothing of it."""
        config = self._features[name].config
        if isinstance(table, config):
            return {name: _frozen_config(table)}
        if isinstance(table, bool):
            self.error(
                name,
                f"{name} is {str(table).lower()}.",
                "a feature is on because its table is there.",
                f"write an empty table, [{name}]." if table else f"leave {name} out.",
            )
            return {name: config()} if table else {}
        if table is not None and not isinstance(table, Mapping):
            self.error(
                name,
                f"{name} is {table!r}.",
                "it is a table of options.",
                f"write [{name}], and the options below it.",
            )
            table = None
        options = {} if table is None else table
        right = {key: value for key, value in options.items() if self._is_option(name, key, value)}
        built = self._built(name, {key: frozen(value) for key, value in right.items()})
        return {} if built is None else {name: built}

    def training(self, table: object) -> dict[str, object]:
        """The options of training."""
        if not isinstance(table, Mapping):
            self.error(
                "training",
                f"training is {table!r}.",
                "it is a table of options.",
                "write [training], and the options below it.",
            )
            return {}
        known: dict[str, object] = {}
        for name, value in table.items():
            option = VOCABULARY.get(name) if isinstance(name, str) else None
            if option is None:
                self._unknown_training(name)
                continue
            if isinstance(value, str) and value == "none" and fits(None, option.type):
                known[name] = None  # TOML has no other way to say so
            elif not fits(value, option.type):
                self._wrong_type(f"training.{name}", value, option.type)
            elif self._is_possible(name, value) and self._has_known_items(name, value):
                known[name] = frozen(value)
        return known

    def allow(self, value: object) -> tuple[str, ...]:
        """The ids of the rules that are not to refuse the plan."""
        if not fits(value, Sequence[str]):
            self.error(
                "allow",
                f"allow is {value!r}.",
                "it is a list of rules' ids, each of which is a text.",
                'write for example allow = ["feature/rule"].',
            )
            return ()
        assert isinstance(value, Sequence)
        return tuple(dict.fromkeys(value))

    def error(self, subject: str, what: str, why: str | None, instead: str | None) -> None:
        """Note something for which the plan is refused."""
        self.found.append(Finding(Severity.ERROR, subject, what, why, instead))

    def _version(self, value: object) -> None:
        if not fits(value, int) or value != FORMAT:
            self.error(
                "version",
                f"version is {value!r}.",
                f"this ascend-suite reads plans of version {FORMAT}.",
                f"write version = {FORMAT}, or leave it out; or install the ascend-suite that the "
                "plan was written for.",
            )

    def _unknown_key(self, key: object) -> None:
        if not isinstance(key, str):
            self.error(str(key), f"{key!r} is no text.", "keys of a plan are.", "put quotes on it.")
            return
        why = f"a plan has tables for features ({listed(self._features)}), training and allow."
        if key in PACKAGES:
            self.error(
                key,
                f"{key} is not installed.",
                f"{PACKAGES[key]} offers it.",
                f"pip install {PACKAGES[key]}",
            )
            return
        near = nearest(key, [*self._features, *PACKAGES, "training", "allow", "version"])
        if near is not None:
            instead = f"did you mean {near}?"
        else:
            instead = self._elsewhere(key) or "take it out."
        self.error(key, f"a plan has no {key!r}.", why, instead)

    def _elsewhere(self, key: str) -> str | None:
        """Where an option belongs that is right, and in the wrong table."""
        if key in VOCABULARY:
            return f"{key} is an option of training: write it in the table training."
        owners = [name for name, hints in self._hints.items() if key in hints]
        if owners:
            return f"{key} is an option of {' and of '.join(owners)}: write it in that table."
        feature = key.replace("_", "-")
        if feature in self._features:
            return f"{feature} is a feature: give it a table of its own, [{feature}]."
        return None

    def _unknown_training(self, name: object) -> None:
        if not isinstance(name, str):
            self._unknown_key(name)
            return
        instead = self._elsewhere(name) or _BY_ARGUMENT.get(attribute_of(name))
        if instead is None:
            near = nearest(name, VOCABULARY)
            instead = "leave it out: no rule reads it." if near is None else f"did you mean {near}?"
        self.error(
            f"training.{name}",
            f"{name!r} is no option of training that is known here.",
            "options are named as megatron-core and MindSpeed name them, with underscores.",
            instead,
        )

    def _is_option(self, feature: str, key: object, value: object) -> bool:
        """Whether a feature has an option of that name, and the value is of its type."""
        hints = self._hints[feature]
        if key not in hints:
            self._unknown_option(feature, str(key))
            return False
        kind = hints[key]
        subject = f"{feature}.{key}"
        if is_code(kind) and isinstance(value, str | int | float | list | Mapping):
            config = self._features[feature].config.__name__
            self.error(
                subject,
                f"{subject} is {value!r}.",
                "it is code, which tables and files cannot hold.",
                f"give it in Python: Plan.of({config}({key}=...)).",
            )
            return False
        if not fits(value, kind):
            self._wrong_type(subject, value, kind)
            return False
        return True

    def _unknown_option(self, feature: str, key: str) -> None:
        hints = self._hints[feature]
        near = nearest(key, hints)
        if key in _SWITCHES:
            instead: str | None = "take it out: the feature is on because its table is there."
        elif near is not None:
            instead = f"did you mean {near}?"
        else:
            instead = self._elsewhere(key) or "take it out."
        self.error(
            f"{feature}.{key}",
            f"{feature} has no option {key!r}.",
            f"its options are {listed(hints)}.",
            instead,
        )

    def _wrong_type(self, subject: str, value: object, kind: Any) -> None:
        self.error(
            subject, f"{subject} is {value!r}.", f"it takes {in_words(kind)}.", _hint(value, kind)
        )

    def _is_possible(self, name: str, value: object) -> bool:
        """Whether a number may be what an option counts or measures; no option is below 0."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        from_one = name.endswith(_FROM_ONE)
        possible = value >= 1 if from_one else value >= 0  # neither holds of NaN
        if not possible:
            self.error(
                f"training.{name}",
                f"training.{name} is {value!r}.",
                f"it is a number {'above 0' if from_one else 'of 0 or above'}.",
                "give such a number, or leave it out.",
            )
        return possible

    def _has_known_items(self, name: str, value: object) -> bool:
        known = VOCABULARY[name].items
        wrong = [one for one in _items(value) if one not in known] if known else []
        for item in wrong:
            near = nearest(item, known)
            self.error(
                f"training.{name}",
                f"training.{name} holds {item!r}.",
                f"megatron-core knows {listed(known)}.",
                "use one of those." if near is None else f"did you mean {near}?",
            )
        return not wrong

    def _built(self, name: str, options: Mapping[str, object]) -> Any | None:
        """The config of what its class accepts; None where it lacks what has no default.

        A class tells of one wrong value alone. So where it refuses, each option is tried by
        itself, and those that are refused then are left out and told of together.
        """
        config = self._features[name].config
        base: dict[str, object] = {}
        for field in dataclasses.fields(config):
            if field.default is field.default_factory is dataclasses.MISSING:
                if field.name not in options:
                    what = f"{name} lacks {field.name}."
                    self.error(name, what, "it has no default.", "give it.")
                    return None
                base[field.name] = options[field.name]
        refused = _refusal(config, options)
        if refused is None:
            return config(**options)
        alone = {key: _refusal(config, base | {key: value}) for key, value in options.items()}
        for key, error in alone.items():
            if error is not None:
                self._refused(f"{name}.{key}", name, error)
        right = {key: value for key, value in options.items() if alone[key] is None}
        refused = _refusal(config, right)
        if refused is None:
            return config(**right)
        self._refused(name, name, refused)
        return config(**base)

    def _refused(self, subject: str, name: str, error: ConfigError) -> None:
        self.error(subject, f"{name}: {error.what}", error.why, error.instead)

    def _no_config(self, config: object, names: Mapping[type[Any], str]) -> None:
        known = listed(kind.__name__ for kind in names)
        if inspect.isclass(config) and config in names:
            self.error(
                config.__name__,
                f"{config.__name__} is a class.",
                "a plan is made of configs.",
                f"write {config.__name__}().",
            )
            return
        self.error(
            type(config).__name__,
            f"a plan was given a {type(config).__name__} as a config.",
            f"the configs of the installed features are {known}.",
            "give the config of a feature; other options go into training=.",
        )


def _arguments() -> Iterator[tuple[str, str]]:
    """What to write for the arguments and flags of training scripts that have other names here."""
    for option in VOCABULARY.values():
        if option.off is not None:
            yield attribute_of(option.off), f"write {option.name} = false."
        names = {option.argument, option.spelt and attribute_of(option.spelt)}
        for name in names - {None, option.name}:
            yield str(name), f"it is called {option.name} here."


_BY_ARGUMENT = dict(_arguments())


def _frozen_config(config: Any) -> Any:
    """The config with tuples for lists, and texts for paths: as a file gives it, and for good."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = {name: frozen(value) for name, value in given.items() if frozen(value) is not value}
    return dataclasses.replace(config, **changed) if changed else config


def _refusal(config: type[Any], options: Mapping[str, object]) -> ConfigError | None:
    try:
        config(**options)
    except ConfigError as error:
        return error
    return None


def _items(value: object) -> list[str]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []


def _hint(value: object, kind: Any) -> str:
    """What to write instead of a value of the wrong type."""
    if isinstance(value, str):
        meant = meant_by(value, kind)
        if meant is not None and not isinstance(meant, str):
            return f"write {str(meant).lower()}, without quotes."
        near = nearest(value, words_of(kind))
        if near is not None:
            return f"did you mean {near!r}?"
    if fits([value], kind):
        return "write a list, also of one."
    return "give such a value, or leave it out."
