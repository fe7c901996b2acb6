"""Lets docstrings show code as Markdown does: an indented block after an empty line.

Sphinx reads docstrings as reStructuredText, which wants `::` before such a block. The sections of
Google style ("Args:") have no empty line before their text and are left alone. Headed essays
("[Note: what outlives what]") become bold lines.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

NOTE = re.compile(r"^\[Note: (.*)\]$")
CODE_INDENT = 4


def with_marked_blocks(lines: list[str]) -> list[str]:
    """Mark every indented block in the lines of a docstring."""
    result: list[str] = []
    text_indent = 0  # of the text that the block under way, or a coming one, stands under
    in_block = False
    for line in lines:
        note = NOTE.match(line)
        if note:
            result += [f"**{note[1][0].upper()}{note[1][1:]}.**", ""]
            continue
        indent = len(line) - len(line.lstrip())
        deeper = indent >= text_indent + CODE_INDENT
        if line.strip() and not (in_block and deeper):
            in_block = deeper and bool(result) and not result[-1].strip() and _is_text(result)
            if in_block:
                result += [" " * text_indent + "::", ""]
            else:
                text_indent = indent
        result.append(line)
    return result


def _is_text(before: list[str]) -> bool:
    """Say whether the last line before an empty one is running text, not an item of a list."""
    last = next((line for line in reversed(before) if line.strip()), "")
    return bool(last) and not last.lstrip().startswith(("* ", "- "))


def _convert(
    app: Sphinx, kind: str, name: str, obj: object, opts: object, lines: list[str]
) -> None:
    lines[:] = with_marked_blocks(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the conversion, ahead of the one that reads Google style."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _convert, priority=400)
    return {"parallel_read_safe": True}
