"""What all commands print by: a console for people, one JSON form for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_suite._version import __version__

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["EXIT_FAILED", "FORMAT", "JsonOption", "StrictOption", "console", "write_json"]

FORMAT = 1
"""The number of the JSON form: raised when a key is changed or dropped, not when one is added."""

EXIT_FAILED = 1
"""The exit code when what was checked does not hold."""

_PIPED_WIDTH = 100  # of tables in a file or a pipe, which have no width of their own

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Count warnings as errors.")]


def console() -> Console:
    """Return a console on standard output: colours on a terminal alone, and not under NO_COLOR."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPED_WIDTH
    return made


def write_json(command: str, *, ok: bool, **values: Any) -> None:
    """Print one JSON object, and nothing else.

    Args:
        command: The command's name.
        ok: Whether the exit code will be 0.
        values: What the command found out, as JSON values.
    """
    head = {"format": FORMAT, "suite": __version__, "command": command, "ok": ok}
    sys.stdout.write(json.dumps({**head, **values}, indent=2, allow_nan=False) + "\n")
