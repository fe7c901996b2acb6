"""Hold the functions of the packages to the size that CONTRIBUTING.md promises.

Usage: python tools/sizes.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 60
LONG = 40
SHARE_OF_LONG = 1 / 20


def functions(paths: list[Path]) -> Iterator[tuple[int, str]]:
    """Yield the length of every function's body (without its docstring) and its place."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1 if ast.get_docstring(node) and node.body[1:] else 0]
                length = (node.end_lineno or first.lineno) - first.lineno + 1
                yield length, f"{path}:{node.lineno} {node.name} has {length} lines"


def problems(paths: list[Path]) -> Iterator[str]:
    """Say which functions are too long, and whether too many are long."""
    found = sorted(functions(paths), reverse=True)
    long = [place for length, place in found if length > LONG]
    yield from (place for length, place in found if length > LONGEST)
    if len(long) > SHARE_OF_LONG * len(found):
        yield f"{len(long)} of {len(found)} functions have over {LONG} lines: {'; '.join(long)}"


if __name__ == "__main__":
    sys.exit("\n".join(problems(sorted(ROOT.glob("packages/*/src/**/*.py")))) or None)
