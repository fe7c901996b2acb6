r"""A step of swap-optimizer on the modelled clock, its windows overlapped and one after the other.

Prints what took how long and draws a figure into the working directory. Nothing is measured: a
simulated NPU's schedule `timed` computes all times from rates. Those of compute are in
`swap_timeline.toml`; those of copies are options, and choose the ratio of the two:

    ascend-sim run --schedule timed --profile benchmarks/swap_timeline.toml \
        --h2d-gbps 2 --d2h-gbps 2 -m benchmarks.swap_timeline NAME
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from ascend_core.optim import Walk
from ascend_sim import Timeline, current
from ascend_sim.spans import Kind, Span
from ascend_swap import SwapOptimizerConfig, swap_optimizer
from benchmarks.prefetch import LEFT, WIDE, box

WINDOWS, ELEMENTS = 8, 65_536  # elements of a window
COLOURS = {"in": "#b8651b", "compute": "#4c78a8", "out": "#6b8e23"}
ROW = 34


@dataclasses.dataclass(frozen=True)
class Phases:
    """What a step took, in microseconds of the modelled clock.

    Attributes:
        makespan: From its beginning to its last completion.
        h2d: All copies to the device.
        compute: All kernels.
        d2h: All copies to the host.
    """

    makespan: float
    h2d: float
    compute: float
    d2h: float

    @property
    def bound(self) -> float:
        """The longest of the three, and the other two of one window: the first and the last."""
        phases = (self.h2d, self.compute, self.d2h)
        return max(phases) + (sum(phases) - max(phases)) / WINDOWS


def step(*, serial: bool = False) -> Timeline:
    """One step, after another one. With `serial`, the host waits for each window."""
    simulator = current()
    assert simulator is not None
    weight = nn.Parameter(torch.ones(WINDOWS * ELEMENTS, device="npu"))
    optimizer = swap_optimizer(optim.AdamW([weight], fused=True), SwapOptimizerConfig(WINDOWS))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.npu.synchronize()
    with simulator.timeline() as timeline:
        if serial:
            home: Any = optimizer._home
            home.walk = _one_by_one(home.walk)
        optimizer.step()
    return timeline


def _one_by_one(walk: Any) -> Any:
    def walked(windows: Any) -> Walk:
        made = walk(windows)
        fetch, enter, leave = made.fetch, made.enter, made.leave

        def enter_late(window: int) -> Any:
            fetch(window)
            return enter(window)

        def leave_at_once(window: int, held: Any) -> None:
            leave(window, held)
            torch.npu.synchronize()

        made.fetch, made.enter, made.leave = lambda window: None, enter_late, leave_at_once
        found: Walk = made
        return found

    return walked


def phases(timeline: Timeline) -> Phases:
    """Sum a timeline up."""

    def total(kind: Kind) -> float:
        return sum(s.end_ns - s.begin_ns for s in timeline.spans if s.kind is kind) / 1000

    return Phases(
        timeline.report().makespan_us, total(Kind.H2D), total(Kind.KERNEL), total(Kind.D2H)
    )


def rows(timeline: Timeline, top: int, scale: float) -> Iterator[str]:
    """Three rows: copies in, kernels, copies out."""
    for number, (name, kind) in enumerate(
        [("in", Kind.H2D), ("compute", Kind.KERNEL), ("out", Kind.D2H)]
    ):
        y = top + ROW * number
        yield f'<text x="0" y="{y + 16}">{name}</text>'
        for span in timeline.spans:
            if span.kind is kind:
                yield from task(span, y, scale, COLOURS[name])


def task(span: Span, y: int, scale: float, colour: str) -> Iterator[str]:
    """A kernel or a copy."""
    width = max(scale * (span.end_ns - span.begin_ns), 0.3)
    yield from box(LEFT + scale * span.begin_ns, y, width, colour)


def draw(title: str, panels: list[tuple[str, Timeline]]) -> str:
    """A figure with a panel for each timeline, on one scale."""
    scale = (WIDE - LEFT) / max(s.end_ns for _, timeline in panels for s in timeline.spans)
    height = 20 + 150 * len(panels) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDE + 20} {height}" '
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\" "
        'role="img" aria-labelledby="title">',
        f'<title id="title">{title}. A model of time.</title>',
        f'<rect x="-10" width="{WIDE + 20}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, timeline) in enumerate(panels):
        top = 24 + 150 * number
        took = f"{timeline.report().makespan_us:,.0f} µs"
        lines.append(f'<text x="0" y="{top}" font-weight="600">{name}: {took}</text>')
        lines += rows(timeline, top + 10, scale)
    legend = "A model of time on a simulated NPU, not an NPU's timing."
    lines.append(f'<text x="0" y="{height - 12}" font-style="italic">{legend}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Report and draw."""
    overlapped, serial = step(), step(serial=True)
    found = {"overlapped": phases(overlapped), "serial": phases(serial)}
    sys.stdout.write(
        json.dumps({k: dataclasses.asdict(v) | {"bound": v.bound} for k, v in found.items()}) + "\n"
    )
    for name in sys.argv[1:]:
        panels = [("windows overlap", overlapped), ("one window after the other", serial)]
        title = "A step of swap-optimizer in windows"
        Path(f"swap-optimizer-timeline-{name}.svg").write_text(draw(title, panels))


if __name__ == "__main__":
    main()
