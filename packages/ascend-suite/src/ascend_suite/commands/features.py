"""`ascend-suite features`: what is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_core.errors import FeatureNotFoundError
from ascend_core.feature import ENTRY_POINT_GROUP, Feature, discover
from ascend_suite._suggestion import nearest
from ascend_suite.commands._completion import complete_feature
from ascend_suite.commands._describe import described_fields
from ascend_suite.commands._findings import say
from ascend_suite.commands._screen import JsonOption, console, write_json

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["features"]


def features(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FEATURE]...",
            help="Show these with their options; all, without options, when left out.",
            autocompletion=complete_feature,
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the installed features: what each saves and costs, and the package that brings it.

    Exit code 0; 2 when there is no feature of a name, or the features cannot be loaded.
    """
    found = discover()
    for name in names or ():
        if name not in found:
            near = nearest(name, found)
            raise FeatureNotFoundError(
                f"there is no feature called {name!r}.",
                why=f"the installed packages offer: {', '.join(found) or 'none'}.",
                instead=f"did you mean {near}?"
                if near
                else "check the spelling, or install the package that offers it.",
            )
    chosen = [found[name] for name in names or found]
    packages = _packages()
    if json:
        write_json("features", ok=True, features=[_as_json(f, packages) for f in chosen])
    elif names:
        for feature in chosen:
            _show_one(console(), feature, packages)
    else:
        _show_all(console(), chosen, packages)


def _packages() -> dict[str, tuple[str, str]]:
    """For each verb the distribution that offers it, and its version."""
    found = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.dist is not None:
            found[entry.load().verb] = (entry.dist.name, entry.dist.version)
    return found


def _as_json(feature: Feature, packages: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    package, version = packages.get(feature.verb, (None, None))
    return {
        "name": feature.name,
        "package": package,
        "version": version,
        "summary": feature.summary,
        "target": feature.target,
        "bitwise": feature.bitwise,
        "moves_to_host": feature.moves_to_host,
        "needs_bf16": feature.needs_bf16,
        "needs_ranks": feature.needs_ranks,
        "options": [
            {"name": name, "type": kind, "default": default, "meaning": meaning}
            for name, kind, default, meaning in _options(feature)
        ],
    }


def _options(feature: Feature) -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each option, as text."""
    meanings = described_fields(feature.config)
    rows = []
    for field in dataclasses.fields(feature.config):
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        else:
            default = "required"
        rows.append((field.name, str(field.type), default, meanings.get(field.name, "")))
    return rows


def _needs(feature: Feature) -> str:
    needs = [
        "BF16 weights" * feature.needs_bf16,
        "several ranks" * feature.needs_ranks,
        "an accelerator" * feature.moves_to_host,
    ]
    return ", ".join(need for need in needs if need) or "–"


def _show_all(
    console: Console, features: Sequence[Feature], packages: Mapping[str, tuple[str, str]]
) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("Feature", no_wrap=True)
    table.add_column("What it saves, and what it costs")
    table.add_column("Works on")
    table.add_column("Needs")
    table.add_column("Same\nbits", justify="center")
    for feature in features:
        same = "yes" if feature.bitwise else "no"
        table.add_row(feature.name, feature.summary, feature.target, _needs(feature), same)
    console.print(table)
    say(console, _versions(features, packages), "dim")


def _versions(features: Sequence[Feature], packages: Mapping[str, tuple[str, str]]) -> str:
    named = {packages[feature.verb] for feature in features if feature.verb in packages}
    return ", ".join(f"{package} {version}" for package, version in sorted(named))


def _show_one(console: Console, feature: Feature, packages: Mapping[str, tuple[str, str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    package = " ".join(packages.get(feature.verb, ("",)))
    console.print(Text.assemble((feature.name, "bold"), (f"  {package}", "dim")))
    say(console, feature.summary)
    console.print(f"Works on the {feature.target}. Needs: {_needs(feature)}.")
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("Option", no_wrap=True)
    table.add_column("Default", overflow="fold")
    table.add_column("Meaning")
    for name, _, default, meaning in _options(feature):
        table.add_row(name, default, meaning)
    console.print(table)
