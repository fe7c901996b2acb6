"""`ascend-suite doctor`: what this machine has, and what of it will fail or be slow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from ascend_core.errors import ConfigError
from ascend_suite.commands._findings import broken, is_refused, show_findings
from ascend_suite.commands._screen import (
    EXIT_FAILED,
    JsonOption,
    StrictOption,
    console,
    write_json,
)
from ascend_suite.doctor import Machine, diagnose, read_machine
from ascend_suite.doctor.facts import as_lines
from ascend_suite.doctor.reading import SECONDS
from ascend_suite.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["doctor", "show_diagnosis"]


def doctor(
    json: JsonOption = False,
    strict: StrictOption = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a library may take to load.")
    ] = SECONDS,
) -> None:
    """Look at this machine: devices, libraries, memory, processors; say what will fail or be slow.

    PyTorch, torch_npu and megatron-core are loaded in processes of their own, so that a broken one
    is a finding and not a crash.

    Exit code 0: nothing will fail. 1: an error was found; with --strict, a warning. 2: a wrong
    option.
    """
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout:g}.", instead="give it a number above 0.")
    machine = _read(timeout)
    findings = diagnose(machine)
    refused = is_refused(findings, strict=strict)
    if json:
        listed = [finding.as_json() for finding in findings]
        write_json("doctor", ok=not refused, machine=machine.as_json(), findings=listed)
    else:
        show_diagnosis(console(), machine, findings)
    raise typer.Exit(EXIT_FAILED if refused else 0)


def show_diagnosis(console: Console, machine: Machine, findings: Sequence[Finding]) -> None:
    """Print the facts, and what is to be said about them."""
    from rich.text import Text

    width = max(len(label) for label, _ in as_lines(machine))
    for label, text in as_lines(machine):
        line = Text(f"{label:<{width}}  ", "dim")
        console.print(line.append(broken(text, console, width + 2), "not dim"), soft_wrap=True)
    console.print()
    show_findings(console, findings)
    if not findings:
        console.print("Nothing here will make training fail or slow.", style="bold green")


def _read(seconds: float) -> Machine:
    """Read the facts; on a terminal somebody waits for that, and is told so."""
    from rich.console import Console

    aside = Console(stderr=True)
    with (
        aside.status("Loading PyTorch and what is above it") if aside.is_terminal else nullcontext()
    ):
        return read_machine(seconds=seconds)
