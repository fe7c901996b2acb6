"""Findings on a terminal: grouped by how grave they are, each with its reason and a way out."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ascend_suite.finding import Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Block", "broken", "is_refused", "say", "show_blocks", "show_findings"]

_STYLES: dict[str, str] = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.NOTE: "bold blue",
}
_LABEL = 11  # columns of "  instead  ", as in the text of errors
_WIDEST = 110  # columns; longer lines are hard to read


def is_refused(findings: Sequence[Finding], *, strict: bool) -> bool:
    """Whether a finding makes the exit code 1: an error, or under `--strict` a warning."""
    grave = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return any(finding.severity in grave for finding in findings)


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines that belong together.

    Attributes:
        lines: Label and text of each. The first one is the sentence that the others explain.
    """

    lines: tuple[tuple[str, str], ...]


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print all findings, the gravest first. Lines are broken on a terminal, and not in a pipe."""
    for severity in Severity:
        found = [finding for finding in findings if finding.severity is severity]
        if found:
            console.print(_counted(severity, len(found)), style=_STYLES[severity])
            show_blocks(console, [Block(tuple(_lines(finding))) for finding in found])


def show_blocks(console: Console, blocks: Sequence[Block]) -> None:
    """Print blocks of labelled lines, with an empty line behind each."""
    from rich.text import Text

    for block in blocks:
        for number, (label, text) in enumerate(block.lines):
            first = number == 0
            line = Text("  ").append(label, _STYLES.get(label, "dim") if first else "dim")
            line.append(" " * (_LABEL - len(line)))
            style = "bold" if first else "dim" * (label == "rule")
            console.print(line.append(broken(text, console, _LABEL), style), soft_wrap=True)
        console.print()


def say(console: Console, text: str, style: str = "") -> None:
    """Print a paragraph: broken on a terminal, one line in a pipe."""
    console.print(broken(text, console, 0), style=style, soft_wrap=True)


def broken(text: str, console: Console, indent: int) -> str:
    """Break a text to a terminal's width, behind an indent; for a pipe it stays one line."""
    if not console.is_terminal:
        return " ".join(text.split())
    width = max(20, min(console.width, _WIDEST) - indent - 1)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def _lines(finding: Finding) -> Iterator[tuple[str, str]]:
    yield finding.severity, finding.what
    if finding.why:
        yield "why", finding.why
    if finding.instead:
        yield "instead", finding.instead
    if finding.rule:
        yield "rule", finding.rule


def _counted(severity: Severity, count: int) -> str:
    return f"{count} {severity}{'s' if count > 1 else ''}"
