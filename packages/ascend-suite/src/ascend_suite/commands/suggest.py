"""`ascend-suite suggest`: the cheapest plan that fits a device."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_suite.commands._findings import say
from ascend_suite.commands._plans import named
from ascend_suite.commands._screen import EXIT_FAILED, JsonOption, console, write_json
from ascend_suite.commands._shape_options import (
    ModelFile,
    hardware_of,
    shape_of,
    with_options_of,
)
from ascend_suite.estimation.hardware import DeviceKind, Hardware
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape
from ascend_suite.size import parse_size, size_text
from ascend_suite.suggestion import Candidate, Suggestion
from ascend_suite.suggestion import suggest as suggest_plan

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show_suggestion", "suggest"]


@with_options_of(ModelShape, Hardware)
def suggest(
    hbm: Annotated[str, typer.Option(metavar="SIZE", help="Memory of the device: 64GiB.")],
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for each device.", show_default="no limit"),
    ] = None,
    device: Annotated[
        DeviceKind, typer.Option(help="The kind of device.", rich_help_panel="Machine")
    ] = "npu",
    runners_up: Annotated[int, typer.Option(min=0, help="How many other plans to show.")] = 4,
    not_bitwise: Annotated[
        bool,
        typer.Option(
            "--not-bitwise",
            help="Look at fused-ops too, which rounds otherwise.",
        ),
    ] = False,
    model: ModelFile = None,
    json: JsonOption = False,
    **fields: Any,
) -> None:
    """Find the plan with the least cost in time that fits a device, and the next best.

    Exit code 0: one fits. 1: none does; it says what would help. 2: an option is wrong.
    """
    found = suggest_plan(
        shape_of(model, fields, Plan()),
        hbm=parse_size(hbm),
        host=None if host is None else parse_size(host),
        device=device,
        hardware=hardware_of(fields),
        runners_up=runners_up,
        bitwise=not not_bitwise,
    )
    fits = found.chosen is not None
    if json:
        write_json("suggest", ok=fits, **_with_plans(found))
    else:
        show_suggestion(console(), found)
    raise typer.Exit(0 if fits else EXIT_FAILED)


def show_suggestion(console: Console, found: Suggestion) -> None:
    """Print the chosen plan, others, and what they take."""
    from rich import box
    from rich.table import Table

    size = size_text(found.hbm)
    if found.chosen is None:
        text = f"No plan fits {size}: the smallest takes {size_text(found.short_by)} more."
        say(console, text, "bold red")
    else:
        text = f"{named(found.chosen.estimate.plan)} fits {size}."
        say(console, text, "bold green")
        say(console, found.chosen.why)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("Plan", overflow="fold")
    for heading in ("Peak", "Of the\ndevice", "Host", "Step\ntime"):
        table.add_column(heading, justify="right", no_wrap=True)
    chosen = () if found.chosen is None else (found.chosen,)
    for candidate in (*chosen, *found.runners_up):
        table.add_row(*_cells(candidate, found.hbm))
    plain = Candidate(found.plain, "")
    if all(candidate.estimate.plan.features for candidate in (*chosen, *found.runners_up)):
        table.add_row(*_cells(plain, found.hbm), style="dim")
    console.print(table)
    if found.chosen is not None and found.chosen.estimate.plan.features:
        console.print("As a file of a plan:\n")
        text = found.chosen.estimate.plan.to_toml().strip()
        console.print(f"{textwrap.indent(text, '    ')}\n", style="cyan", soft_wrap=True)
    for line in found.advice:
        say(console, f"What would help: {line}")


def _with_plans(found: Suggestion) -> dict[str, Any]:
    """The JSON values, with the plans as tables that `Plan.from_mapping` reads."""
    values = found.as_json()
    chosen = () if found.chosen is None else (found.chosen,)
    shown = (*filter(None, (values["chosen"],)), *values["runners_up"])
    for candidate, one in zip((*chosen, *found.runners_up), shown, strict=True):
        one["plan"] = candidate.estimate.plan.to_mapping()
    return values


def _cells(candidate: Candidate, hbm: int) -> tuple[str, ...]:
    estimate = candidate.estimate
    return (
        named(estimate.plan),
        size_text(estimate.peak_bytes),
        f"{estimate.peak_bytes / hbm:.0%}",
        size_text(estimate.host_bytes),
        f"{estimate.time.ratio:.2f} x",
    )
