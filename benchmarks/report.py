"""Writes what was measured: a table to read, and JSON to keep."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ascend_core.device import current_backend
from benchmarks.timing import SPREAD, Row

__all__ = ["document", "hardware", "result_path", "table", "write"]

_COLUMNS = ("case", "variant", "ratio", "low .. high", "wall", "ms", "MiB")


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one block per benchmark."""
    blocks = []
    for benchmark in dict.fromkeys(row.benchmark for row in rows):
        chosen = [row for row in rows if row.benchmark == benchmark]
        cells = [_COLUMNS, *(_cells(row) for row in chosen)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
        lines = ["  ".join(_pad(line, widths)).rstrip() for line in cells]
        bytes_are = "; ".join(
            dict.fromkeys(row.bytes_are for row in chosen if row.bytes is not None)
        )
        head = f"{benchmark}: time against the baseline by the {chosen[0].clock} clock"
        blocks.append("\n".join([f"{head}; bytes {bytes_are}" if bytes_are else head, *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else "no rows\n"


def document(rows: Sequence[Row], command: str) -> dict[str, Any]:
    """The rows with all that is needed to judge them, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "spread": SPREAD,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def hardware() -> dict[str, Any]:
    """What the benchmarks ran on."""
    backend = current_backend()
    return {
        "backend": backend.name,
        "device": str(backend.capabilities()["model"]),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def result_path(folder: Path, measured: Mapping[str, Any]) -> Path:
    """Where a run is kept: `<date>-<hardware>.json`."""
    used = measured["hardware"]
    name = used["cpu"] if used["backend"] == "cpu" else used["device"]
    label = re.sub(r"[^a-z0-9]+", "-", f"{name} {used['cores']} cores".lower()).strip("-")
    return folder / f"{measured['date'][:10]}-{label}.json"


def write(measured: Mapping[str, Any], path: Path) -> None:
    """Write a document as JSON, making the folder when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def _cells(row: Row) -> tuple[str, ...]:
    size = "" if row.bytes is None else f"{row.bytes / 2**20:.2f}"
    spread = f"{row.ratio_low:.3f} .. {row.ratio_high:.3f}"
    if row.variant == row.baseline:
        spread = "baseline"
    times = (f"{row.wall_ratio.median:.3f}", f"{row.seconds * 1e3:.2f}")
    return (row.case, row.variant, f"{row.ratio:.3f}", spread, *times, size)


def _pad(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    text, numbers = line[:2], line[2:]
    left = [cell.ljust(width) for cell, width in zip(text, widths, strict=False)]
    return left + [cell.rjust(width) for cell, width in zip(numbers, widths[2:], strict=True)]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
