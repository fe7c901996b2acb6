"""The directive `config-options`: the table of a feature's options, read from its dataclass."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def described_fields(config: type[Any]) -> dict[str, str]:
    """Read what the `Attributes:` section of a class says of each field."""
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("\nAttributes:\n")
    return {name: " ".join(text.split()) for name, text in ENTRY.findall(section)}


def default_of(field: dataclasses.Field[Any]) -> str:
    """Write a field's default as Python code; a field without one is required."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def options_table(config: type[Any]) -> str:
    """Write a config's fields as a Markdown table.

    Raises:
        ValueError: When the class says nothing about one of its fields.
    """
    described = described_fields(config)
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        if field.name not in described:
            raise ValueError(f"{config.__name__} does not describe its field {field.name!r}.")
        kind = str(field.type).replace("|", r"\|")
        cells = [f"`{field.name}`", f"`{kind}`", default_of(field), described[field.name]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


class ConfigOptions(SphinxDirective):
    """Puts the options of a config in its place: `{config-options} package.module.Config`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Import the config and parse its table as Markdown."""
        module, _, name = self.arguments[0].rpartition(".")
        config = getattr(importlib.import_module(module), name)
        try:
            table = options_table(config)
        except ValueError as error:
            raise self.error(str(error)) from error
        return self.parse_text_to_nodes(table)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("config-options", ConfigOptions)
    return {"parallel_read_safe": True}
