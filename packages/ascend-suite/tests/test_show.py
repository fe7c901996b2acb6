from __future__ import annotations

from typing import Any

from rich.console import Console

from ascend_suite.demo.result import DemoResult, Run, Status
from ascend_suite.demo.settings import DemoSettings
from ascend_suite.demo.show import as_table

LONG = "recompute-activation"
FULL = {"status": Status.OUT_OF_MEMORY, "reason": "tried to allocate 1 PiB"}


def run(feature: str, **changes: Any) -> Run:
    known = {"losses": (5.0, 4.0, 3.0), "peak_bytes": 3 * 2**20}
    return Run(feature, **{**known, **changes})


def rows(*runs: Run) -> dict[str, list[str]]:
    """The cells of each run in the printed table, by the run's name."""
    console = Console(width=80)
    with console.capture() as printed:
        console.print(as_table(DemoResult(DemoSettings(), "cpu", "2.13.0", 1, runs, {})))
    lines = [line.split("  ") for line in printed.get().splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {line[0]: line[1:] for line in cells if line}


def test_a_feature_that_finished_where_plain_did_not_is_compared_with_nothing() -> None:
    shown = rows(run("plain", losses=(), peak_bytes=None, **FULL), run(LONG))
    assert shown["plain"] == ["out of memory", "–", "–", "–", "–"]
    assert shown[LONG] == ["3.0 MiB", "–", "–", "no plain run", "3.0000"]
    assert shown["to compare"] == shown["with"] == []


def test_a_feature_out_of_memory_has_a_row_of_its_own() -> None:
    plain = run("plain", bitwise_equal=True, saved_bytes=0, step_time_ratio=1.0)
    shown = rows(plain, run("move", losses=(), peak_bytes=None, **FULL))
    assert shown["plain"] == ["3.0 MiB", "–", "1.00 x", "yes", "3.0000"]
    assert shown["move"] == ["out of memory", "–", "–", "–", "–"]


def test_other_bits_are_told_from_a_broken_promise() -> None:
    known = {"bitwise_equal": False, "saved_bytes": 0, "step_time_ratio": 0.5}
    plain = run("plain", bitwise_equal=True, saved_bytes=0, step_time_ratio=1.0)
    shown = rows(plain, run("broken", **known), run("openly", bitwise_promised=False, **known))
    assert shown["broken"][-2] == "no"
    assert shown["openly"][-2] == "no, and not" and ["promised"] in shown.values()
