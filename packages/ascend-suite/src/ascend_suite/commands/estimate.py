"""`ascend-suite estimate`: what a training takes on a device, with a plan and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_suite.commands._completion import complete_plan
from ascend_suite.commands._findings import say
from ascend_suite.commands._plans import named, sound_plan
from ascend_suite.commands._screen import JsonOption, console, write_json
from ascend_suite.commands._shape_options import (
    ModelFile,
    hardware_of,
    shape_of,
    with_options_of,
)
from ascend_suite.estimation.estimate import estimate as estimate_training
from ascend_suite.estimation.hardware import DeviceKind, Hardware
from ascend_suite.estimation.result import Estimate
from ascend_suite.shape import ModelShape
from ascend_suite.size import size_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["estimate", "show_estimate"]


@with_options_of(ModelShape, Hardware)
def estimate(
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAN]",
            help="A file of TOML, YAML or JSON, or `-` for TOML on standard input; no feature when "
            "left out.",
            autocompletion=complete_plan,
            show_default=False,
        ),
    ] = None,
    model: ModelFile = None,
    device: Annotated[
        DeviceKind, typer.Option(help="The kind of device.", rich_help_panel="Machine")
    ] = "npu",
    json: JsonOption = False,
    **fields: Any,
) -> None:
    """Estimate the memory of a device by kind, and the time of a step, with a plan and without.

    What the plan's table `[training]` says of the model counts where no option says it.

    Exit code 0; 2 when the model, the plan or an option is wrong.
    """
    chosen = sound_plan(plan)
    shape = shape_of(model, fields, chosen)
    hardware = hardware_of(fields)
    plain = estimate_training(shape, device=device, hardware=hardware)
    found = estimate_training(shape, chosen, device=device, hardware=hardware)
    if json:
        write_json("estimate", ok=True, plan=found.as_json(), plain=plain.as_json())
    else:
        show_estimate(console(), found, plain)


def show_estimate(console: Console, found: Estimate, plain: Estimate) -> None:
    """Print the bytes at the peak by kind, beside those without any feature, and the time."""
    from rich import box
    from rich.table import Table

    alone = not found.plan.features
    columns = [plain] if alone else [plain, found]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("At the peak")
    for one in columns:
        table.add_column("plain" if one is plain else "with the plan", justify="right")
    kinds = dict.fromkeys(kind for one in columns for kind in one.peak.bytes)
    for kind in kinds:
        table.add_row(kind, *(size_text(one.peak.bytes.get(kind, 0)) for one in columns))
    table.add_section()
    table.add_row("all", *(size_text(one.peak_bytes) for one in columns), style="bold")
    table.add_row("peak is in", *(one.peak.name for one in columns))
    table.add_row("host memory", *(size_text(one.host_bytes) for one in columns))
    table.add_row("step time", *(f"{one.time.ratio:.2f} x" for one in columns))
    say(console, _heading(found))
    console.print(table)
    for note in found.notes:
        say(console, f"note: {note}")


def _heading(found: Estimate) -> str:
    parameters = _counted(found.parameters)
    if found.parameters_per_device != found.parameters:
        parameters += f", of them {_counted(found.parameters_per_device)} on the fullest device"
    return f"{parameters} parameters; {named(found.plan)}, on {found.device}."


def _counted(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 10**8 else f"{number / 1e6:.2f} million"
