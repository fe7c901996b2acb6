"""The command `ascend-suite`. This module needs nothing beyond `ascend-core`, and no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import NoReturn

from ascend_core.errors import AscendError, UnavailableError

__all__ = ["main"]

_EXTRA = ("typer", "rich", "matplotlib")
_EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line.

    Args:
        argv: The arguments after the command's name; those of the process when left out.

    Raises:
        SystemExit: Always. Its code is 0 for success, 1 when what the command checked does not
            hold, and 2 when the command could not do what it was asked for.
    """
    try:
        _require_extra()
        from ascend_suite._app import app

        app(args=argv, prog_name="ascend-suite")
    except AscendError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    raise SystemExit(_EXIT_USAGE)


def _require_extra() -> None:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "the command line of ascend-suite is not installed.",
            why=f"it needs {', '.join(missing)}, which the extra 'cli' brings.",
            instead="pip install 'ascend-suite[cli]'",
        )
