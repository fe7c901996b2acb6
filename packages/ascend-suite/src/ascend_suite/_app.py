"""The commands of `ascend-suite` and their options. Needs typer; imports no torch by itself.

[Note: one command at a time]
A command's modules, and what typer makes of its options, cost tens of milliseconds. So a process
that was asked for one command makes no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated

import typer

from ascend_suite._version import __version__

__all__ = ["COMMANDS", "build_app", "commands_for"]

COMMANDS = ("check", "explain", "features", "estimate", "suggest", "doctor", "demo")
"""The functions of these names in the modules of these names, in the order of the help."""


def build_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """Make the application of these commands."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_ascend_suite)
    for name in commands:
        app.command(name)(getattr(importlib.import_module(f"ascend_suite.commands.{name}"), name))
    return app


def commands_for(arguments: Sequence[str]) -> Sequence[str]:
    """The command that is asked for; all, where none is, or one that is not known.

    See [Note: one command at a time].
    """
    return arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ascend-suite {__version__}")
        raise typer.Exit


def _ascend_suite(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Train with less device memory: see what each installed feature saves and costs."""
