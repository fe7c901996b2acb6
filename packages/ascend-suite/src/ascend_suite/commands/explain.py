"""`ascend-suite explain`: why two things do or do not go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ascend_suite.commands._completion import complete_subject
from ascend_suite.commands._findings import Block, say, show_blocks
from ascend_suite.commands._screen import JsonOption, console, write_json
from ascend_suite.explain import Kind, Verdict
from ascend_suite.explain import explain as explain_pair
from ascend_suite.rule import Rule

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["explain", "show_verdict"]

_STYLES = {
    Kind.TOGETHER: "bold green",
    Kind.NEEDS: "bold yellow",
    Kind.ALLOWED: "bold yellow",
    Kind.REFUSED: "bold red",
}

_First = Annotated[
    str,
    typer.Argument(
        metavar="FEATURE",
        help="A feature; or an option of training, also as its flag.",
        autocompletion=complete_subject,
    ),
]
_Second = Annotated[
    str,
    typer.Argument(
        metavar="OTHER",
        help="Another feature; or, where the first is one, an option of training.",
        autocompletion=complete_subject,
    ),
]


def explain(a: _First, b: _Second, json: JsonOption = False) -> None:
    """Explain why two features, or a feature and an option of training, do or do not go together.

    Flags come behind two dashes: `ascend-suite explain swap-optimizer -- --bf16`.

    Exit code 0, whatever the answer is. 2: there is nothing of such a name.
    """
    verdict = explain_pair(a, b)
    if json:
        write_json("explain", ok=True, **verdict.as_json())
    else:
        show_verdict(console(), verdict)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print how two things go together, and each rule about both."""
    sentence, *_ = str(verdict).split("\n", 1)
    say(console, sentence, _STYLES[verdict.kind])
    if len(verdict.order) > 1 and verdict.kind is not Kind.REFUSED:
        say(console, f"They are turned on in this order: {', '.join(verdict.order)}.")
    console.print()
    show_blocks(console, [Block(tuple(_lines(rule))) for rule in verdict.rules])


def _lines(rule: Rule) -> Iterator[tuple[str, str]]:
    yield rule.severity, rule.what
    yield "when", f"{rule.fires_when}."
    yield "why", rule.because
    yield "instead", rule.instead
    if rule.proof is not None:
        yield "allow", f"allow = [{rule.id!r}]: {rule.proof} shows that it works."
    yield "rule", rule.id
