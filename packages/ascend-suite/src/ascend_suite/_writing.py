"""A plan as tables and as TOML. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ascend_core.errors import ConfigError

if TYPE_CHECKING:
    from ascend_suite.plan import Plan

__all__ = ["as_mapping", "as_toml"]


def as_mapping(plan: Plan, version: int, *, full: bool) -> dict[str, Any]:
    """The plan as tables of plain values.

    Args:
        plan: The plan.
        version: Of the form that is written.
        full: Also what options have by default.

    Raises:
        ConfigError: When an option is code.
    """
    tables: dict[str, Any] = {"version": version}
    if plan.allow:
        tables["allow"] = list(plan.allow)
    if plan.training:
        tables["training"] = {name: _plain(name, value) for name, value in plan.training.items()}
    for name, config in plan.features.items():
        tables[name] = dict(_options(name, config, full))
    return tables


def as_toml(tables: Mapping[str, Any]) -> str:
    """Write what `as_mapping` returned as TOML, where nothing says `none` but the text."""
    single = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    lines = [f"{key} = {_toml(value)}" for key, value in single.items()]
    for name, table in tables.items():
        if name in single:
            continue
        lines += ["", f"[{name}]"]
        for key, value in table.items():
            if value is not None:
                lines.append(f"{key} = {_toml(value)}")
            elif name == "training":
                lines.append(f'{key} = "none"')
    return "\n".join(lines) + "\n"


def _options(name: str, config: Any, full: bool) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if full or value != default:
            yield field.name, _plain(f"{name}.{field.name}", value)


def _plain(subject: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [_plain(subject, item) for item in value]
    raise ConfigError(
        f"{subject} is {value!r}, which no file can hold.",
        why="it is code.",
        instead="keep such a plan in Python, or name modules instead of giving their types.",
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # The escapes of JSON are some of TOML's, which also wants one for U+007F.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
