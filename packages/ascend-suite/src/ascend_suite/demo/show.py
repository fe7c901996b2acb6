"""The demo on a terminal: a progress bar, a table, a picture and a JSON file. Needs rich."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ascend_core.errors import ConfigError
from ascend_core.feature import Feature
from ascend_core.memory import plot_timelines
from ascend_suite.demo.result import BEST, PLAIN_BF16, DemoResult, Run, Status
from ascend_suite.demo.runner import run_demo
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.variants import planned_steps

__all__ = ["as_table", "show_demo"]

_MIB = 2**20
_UNKNOWN = "–"
_ALONE = "no plain run\nto compare\nwith"
_OPENLY_OTHER = "no, and not\npromised"


def show_demo(
    settings: DemoSettings,
    features: Mapping[str, Feature],
    *,
    device: str | None = None,
    folder: Path = Path(),
    json_file: Path | None = None,
    console: Console | None = None,
) -> int:
    """Run the demo and show what it found out.

    Args:
        settings: What is trained and measured.
        features: The features to show, by name.
        device: Name of the device; the best one that is present when left out.
        folder: Where `demo.png` is written; made when it is not there.
        json_file: Where the figures are written as JSON.
        console: Where the table goes; standard output when left out. The progress bar and the
            failures go to standard error.

    Returns:
        The exit code: 0 for a success, 1 for a failure, see `DemoResult.failures`.

    Raises:
        ConfigError: When the results could not be written to where they should go.
        AscendError: See `run_demo`.
    """
    picture = folder / "demo.png"
    for path in (picture, json_file):
        if path is not None:
            _require_writable(path)
    console = console or Console()
    aside = Console(stderr=True)
    result = _run_with_progress(settings, features, device, aside)
    console.print(as_table(result))
    _explain(result, features, console)
    if len(result.runs) == 1:
        console.print("No feature was shown: none is installed.")
    if result.timelines:
        plot_timelines(result.timelines, picture)
        console.print(f"Memory over time: {picture}", highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=2, allow_nan=False) + "\n")
        console.print(f"All figures: {json_file}", highlight=False, soft_wrap=True)
    for failure in result.failures:
        aside.print(f"Failed: {failure}.", style="bold red", highlight=False, soft_wrap=True)
    return 1 if result.failures else 0


def as_table(result: DemoResult) -> Table:
    """Lay out one row per run."""
    settings = result.settings
    table = Table(
        title=(
            f"A GPT of {result.parameters:,} parameters (layers {settings.layers}, width "
            f"{settings.hidden})\n{settings.batch} x {settings.seq} bytes in a step, on "
            f"{result.device}"
        ),
        caption=(
            f"Peak memory: the most in use at once in {settings.memory_steps} steps, weights and "
            "optimizer state included. Step time: relative to plain, median over "
            f"{settings.time_rounds} rounds in which the runs take turns. Identical: the losses of "
            f"all {settings.steps} steps, the last gradients and the final weights."
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("Feature", overflow="fold")
    for heading in ("Peak\nmemory", "Memory\nsaved", "Step-time\nratio"):
        table.add_column(heading, justify="right")
    table.add_column("Loss\nidentical\nto the bit", justify="center")
    table.add_column("Final\nloss", justify="right")
    for run in result.runs:
        table.add_row(*_cells(run, result.plain_of(run)))
    return table


def _cells(run: Run, plain: Run | None) -> tuple[str | Text, ...]:
    if run.status is not Status.FINISHED:
        return run.feature, run.status.value, _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN
    assert run.peak_bytes is not None and run.final_loss is not None
    saved = ratio = _UNKNOWN
    identical: str | Text = _ALONE
    if run.saved_bytes is not None and plain and plain.peak_bytes and run is not plain:
        saved = f"{run.saved_bytes / _MIB:.1f} MiB\n({run.saved_bytes / plain.peak_bytes:.0%})"
    if run.step_time_ratio is not None:
        ratio = f"{run.step_time_ratio:.2f} x"
    if run.bitwise_equal is not None:
        identical = _verdict(run)
    peak = f"{run.peak_bytes / _MIB:.1f} MiB"
    return run.feature, peak, saved, ratio, identical, f"{run.final_loss:.4f}"


def _explain(result: DemoResult, features: Mapping[str, Feature], console: Console) -> None:
    """Say what the table leaves open: why a run did not finish, has other bits, or only costs."""
    for run in result.runs:
        if run.reason is not None:
            console.print(
                f"{run.feature}, {run.status}: {run.reason}", highlight=False, markup=False
            )
        if run.bitwise_equal is False and not run.bitwise_promised:
            console.print(_rounding(run), highlight=False, markup=False)
    for remark in _remarks(result, features):
        console.print(remark, highlight=False, markup=False)
    moving = [name for name, feature in features.items() if feature.moves_to_host]
    if moving and result.device == "cpu":
        console.print(
            f"{', '.join(moving)}: moves memory to the host. For a CPU that is the same memory, so "
            "it only costs here; try --device npu."
        )


def _remarks(result: DemoResult, features: Mapping[str, Feature]) -> list[str]:
    """Say what the rows are that are not a feature alone beside the plain run."""
    runs = {run.feature: run for run in result.runs}
    remarks = []
    if BEST in runs:
        remarks.append(
            f"{BEST}: {' + '.join(runs[BEST].features)}. Of the features that lower the peak, the "
            "one that does most, and each further one that no rule refuses and that lowers it more."
        )
    if PLAIN_BF16 in runs:
        against = [r.feature for r in result.runs if r.against == PLAIN_BF16 != r.feature]
        remarks.append(
            f"{', '.join(against)}: compared with {PLAIN_BF16}, BF16 weights with FP32 masters "
            f"beside them, over {len(runs[PLAIN_BF16].losses)} steps."
        )
    between = [name for name, feature in features.items() if feature.needs_ranks]
    if between:
        remarks.append(
            f"{', '.join(between)}: one rank alone. This shows that bits are the same, and what it "
            "costs; what it is for shows between ranks. (shard-optimizer leaves whole gradients "
            "nowhere: losses and weights are compared.)"
        )
    return remarks


def _verdict(run: Run) -> Text:
    if run.bitwise_equal:
        return Text("yes", "green")
    return Text("no", "bold red") if run.bitwise_promised else Text(_OPENLY_OTHER, "yellow")


def _rounding(run: Run) -> str:
    """Say how far a run is from plain whose feature computes something to other roundings."""
    assert run.loss_difference is not None
    return (
        f"{run.feature} does not promise the plain run's bits: {run.difference}. The losses of the "
        f"two differ by at most {run.loss_difference:.1e}."
    )


def _run_with_progress(
    settings: DemoSettings, features: Mapping[str, Feature], device: str | None, console: Console
) -> DemoResult:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    width = max(len(name) for name in (BEST, *features))
    with Progress(*columns, console=console) as progress:
        total = planned_steps(settings, features)
        task = progress.add_task("starting", total=total)

        def on_steps(name: str, part: str, steps: int) -> None:
            progress.update(task, advance=steps, description=f"{name:{width}}  {part:8}")

        result = run_demo(settings, features=features, device=device, on_steps=on_steps)
        progress.update(task, description="done")
    return result


def _require_writable(path: Path) -> None:
    """Make the folder of `path`, so that a training is not wasted on a path that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path if path.exists() else path.parent
        if path.is_dir() or not os.access(target, os.W_OK):
            raise OSError(f"{target} is a folder" if path.is_dir() else f"{target} is read-only")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written.",
            why=str(error),
            instead="choose a file in a folder that you can write to.",
        ) from error
