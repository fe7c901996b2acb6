"""What a file of a plan holds, in TOML, YAML or JSON. Imports no torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ascend_core.errors import UnavailableError
from ascend_suite.finding import Finding, Severity

__all__ = ["read_file"]


def read_file(path: Path) -> tuple[Mapping[Any, object], list[Finding]]:
    """Read a file of a plan; its ending says its form.

    Args:
        path: Ends in `.toml`, `.yaml`, `.yml` or `.json`.

    Returns:
        What it holds, and what is wrong with it as a file; nothing is held where it cannot be read.

    Raises:
        UnavailableError: When a file of YAML is given, and there is nothing that reads it.
    """
    parse = _FORMS.get(path.suffix.lower())
    if parse is None:
        return {}, [
            _error(
                path,
                f"{path} has no ending that is known.",
                "the ending of a name says how the file is read.",
                f"use one of {', '.join(_FORMS)}.",
            )
        ]
    try:
        content, repeated = parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        return {}, [_error(path, f"{path} cannot be read.", error.strerror, "check the path.")]
    except RecursionError:
        why = "its lists or tables are too deep; a plan is a table of tables."
        return {}, [_error(path, f"{path} cannot be read.", why, "correct the file there.")]
    except ValueError as error:  # of decoding, and of all three parsers
        why = " ".join(str(error).split())
        return {}, [_error(path, f"{path} cannot be read.", why, "correct the file there.")]
    found = [
        _error(
            path,
            f"{path} gives {key!r} twice.",
            "only one of the two would count.",
            "leave one of them out.",
        )
        for key in repeated
    ]
    if content is None:  # an empty file of YAML
        content = {}
    if not isinstance(content, Mapping):
        what = f"{path} holds {_NAMES.get(type(content), 'a single value')}."
        found.append(_error(path, what, "a plan is a table of tables.", "see the page of plans."))
        content = {}
    return content, found


def _error(path: Path, what: str, why: str | None, instead: str) -> Finding:
    return Finding(Severity.ERROR, path.name, what, why, instead)


def _toml(text: str) -> tuple[object, list[str]]:
    return tomllib.loads(text), []  # it refuses what is given twice itself


def _json(text: str) -> tuple[object, list[str]]:
    repeated: list[str] = []

    def table(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated.extend(_repeated(key for key, _ in pairs))
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table), repeated


def _yaml(text: str) -> tuple[object, list[str]]:
    if importlib.util.find_spec("yaml") is None:
        raise UnavailableError(
            "plans in YAML cannot be read here.",
            why="they need PyYAML, which the extra 'yaml' brings.",
            instead="pip install 'ascend-suite[yaml]', or write the plan in TOML.",
        )
    yaml = importlib.import_module("yaml")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        repeated = list(_repeated_keys(root, yaml.MappingNode))
        return yaml.safe_load(text), repeated
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _repeated_keys(node: Any, mapping: type[Any]) -> Iterator[str]:
    """The keys that a document of YAML has twice: a plan has tables of tables, and no deeper."""
    if not isinstance(node, mapping):
        return
    yield from _repeated(key.value for key, _ in node.value)
    for _, table in node.value:
        if isinstance(table, mapping):
            yield from _repeated(key.value for key, _ in table.value)


def _repeated(keys: Any) -> Iterator[str]:
    seen: set[object] = set()
    for key in keys:
        if str(key) in seen:
            yield str(key)
        seen.add(str(key))


_NAMES: Mapping[type, str] = {list: "a list", str: "a text", int: "a number", float: "a number"}

_FORMS: Mapping[str, Callable[[str], tuple[object, list[str]]]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": _json,
}
