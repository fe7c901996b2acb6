"""The commands of `ascend-suite` and their options. Needs typer; imports no torch by itself."""

from __future__ import annotations

from typing import Annotated

import typer

from ascend_suite._version import __version__
from ascend_suite.commands.check import check
from ascend_suite.commands.demo import demo
from ascend_suite.commands.doctor import doctor
from ascend_suite.commands.estimate import estimate
from ascend_suite.commands.explain import explain
from ascend_suite.commands.features import features
from ascend_suite.commands.suggest import suggest

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ascend-suite {__version__}")
        raise typer.Exit


@app.callback()
def ascend_suite(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Train with less device memory: see what each installed feature saves and costs."""


for _command in (check, explain, features, estimate, suggest, doctor, demo):
    app.command()(_command)
