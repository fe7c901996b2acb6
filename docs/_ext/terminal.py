"""Draw what a command prints on a terminal as an SVG, colours included.

python docs/_ext/terminal.py docs/figures/terminal-check.svg -- ascend-suite check plan.toml
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

_CELL = 12.2  # a character's width, in units of the picture
_INDENTED = re.compile(
    r'x="([\d.]+)" (y="[\d.]+") textLength="([\d.]+)"([^>]*)>((?:&#160;)+)(?=[^<&])'
)
_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # of a server; readers have fonts


def main() -> None:
    """Run the command, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    printed, _ = printed_on_terminal(options.command, options.columns, errors=False)
    options.picture.write_text(as_svg(printed, shlex.join(options.command), options.columns))


def printed_on_terminal(
    command: Sequence[str], columns: int, folder: Path | None = None, *, errors: bool = True
) -> tuple[str, int]:
    """Run a command whose output is a terminal, and return what it writes there and its exit code.

    Args:
        command: The program and its arguments.
        columns: The terminal's width.
        folder: Where it runs; here when left out.
        errors: Whether what it writes to standard error is shown, too.
    """
    above, below = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=below,
        stderr=below if errors else subprocess.DEVNULL,
        env=environment,
        cwd=folder,
    )
    os.close(below)
    chunks = []
    try:
        while chunk := os.read(above, 1 << 16):
            chunks.append(chunk)
    except OSError:  # so Linux says that the other end is closed
        pass
    finally:
        os.close(above)
    return b"".join(chunks).decode().replace("\r\n", "\n"), process.wait()


def as_svg(printed: str, title: str, columns: int) -> str:
    """Draw text with its escape codes."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere)
        console.print(Text.from_ansi(printed.strip("\n")))
        svg = console.export_svg(title=title, unique_id="terminal")
    return _INDENTED.sub(_moved, _FONT.sub("", svg)).replace("Fira Code, monospace", "monospace")


def _moved(match: re.Match[str]) -> str:
    """Place indented text where it begins: some programs drop the spaces before it."""
    x, y, length, rest, spaces = match.groups()
    shift = spaces.count(";") * _CELL
    return f'x="{float(x) + shift:g}" {y} textLength="{float(length) - shift:g}"{rest}>'


if __name__ == "__main__":
    main()
