"""The command `ascend-suite`. This module needs nothing beyond `ascend-core`, and no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
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
            hold, 2 when the command could not do what it was asked for, and 130 when it was
            interrupted.
    """
    with _writable(), _ended_by_a_closed_pipe():
        try:
            _require_extra()
            from ascend_suite._app import build_app, commands_for

            arguments = sys.argv[1:] if argv is None else list(argv)
            build_app(commands_for(arguments))(args=arguments, prog_name="ascend-suite")
        except AscendError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    raise SystemExit(_EXIT_USAGE)


@contextlib.contextmanager
def _writable() -> Iterator[None]:
    """Write what the output has no letter for as `?`, and nothing where there is no output."""
    with contextlib.ExitStack() as stack:
        if sys.stdout is None:  # closed, as `>&-` does
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        elif isinstance(sys.stdout, io.TextIOWrapper):
            stack.callback(sys.stdout.reconfigure, errors=sys.stdout.errors)
            sys.stdout.reconfigure(errors="replace")
        yield


@contextlib.contextmanager
def _ended_by_a_closed_pipe() -> Iterator[None]:
    """Let whoever closes our output end us without a word, as other Unix programs are: `| head`.

    Python ignores the signal by default, and then raises at every further line. Its setting is that
    of before afterwards. What is still buffered is written under ours.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


def _require_extra() -> None:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(
            "the command line of ascend-suite is not installed.",
            why=f"it needs {', '.join(missing)}, which the extra 'cli' brings.",
            instead="pip install 'ascend-suite[cli]'",
        )
