"""Weights that are fetched from the host, into one buffer and into two, on the modelled clock.

Prints both reports and draws prefetch-timeline.svg into the working directory. Nothing is measured:
a simulated NPU's schedule `timed` computes all times from the rates of its profile.

    ascend-sim run --schedule timed -m benchmarks.prefetch
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ascend_sim import Timeline, current
from ascend_sim.spans import Span

LAYERS, ROWS, WIDTH = 5, 5120, 1024

WIDE, ROW, LEFT = 900, 34, 120
COLOURS = {"compute": "#4c78a8", "copy": "#b8651b", "exposed": "#f3d9d7"}
TITLE = "A model of time, not an NPU's timing"


def forward(buffers: int) -> Timeline:
    """Multiply by each layer's weight, which is fetched as soon as a buffer is free."""
    simulator = current()
    assert simulator is not None
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.zeros(ROWS, WIDTH, device="npu")
    weights = [torch.zeros(WIDTH, WIDTH).pin_memory() for _ in range(LAYERS)]
    places = [torch.zeros(WIDTH, WIDTH, device="npu") for _ in range(buffers)]
    arrived, used = ([torch.npu.Event() for _ in range(LAYERS)] for _ in range(2))
    torch.npu.synchronize()
    with simulator.timeline() as timeline:
        for layer, weight in enumerate(weights):
            place = places[layer % buffers]
            if layer >= buffers:
                side.wait_event(used[layer - buffers])
            with torch.npu.stream(side):
                place.copy_(weight, non_blocking=True)
            arrived[layer].record(side)
            main.wait_event(arrived[layer])
            torch.mm(x, place)
            used[layer].record(main)
        main.synchronize()
    return timeline


def box(x: float, y: float, width: float, colour: str, text: str = "") -> Iterator[str]:
    """A rectangle, and a text in it."""
    yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" rx="3" fill="{colour}"/>'
    if text:
        place = f'x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="#ffffff"'
        yield f"<text {place}>{text}</text>"


def panel(timeline: Timeline, title: str, top: int, scale: float) -> Iterator[str]:
    """Two rows: kernels with the gaps between them, and copies."""
    report = timeline.report()
    work = [span for span in timeline.spans if span.kind.is_work]
    kernels = [span for span in work if not span.kind.is_copy]
    copies = [span for span in work if span.kind.is_copy]
    figures = f"{report.makespan_us:.0f} µs, exposed transfer {report.exposed_transfer_us:.0f} µs"
    yield f'<text x="0" y="{top}" font-weight="600">{title}: {figures}</text>'
    rows = [("compute", kernels, top + 10), ("copies", copies, top + 10 + ROW)]
    for name, _, y in rows:
        yield f'<text x="0" y="{y + 16}">{name}</text>'

    def at(nanoseconds: int) -> float:
        return LEFT + scale * nanoseconds

    free = 0
    for kernel in kernels:
        yield from box(at(free), top + 10, scale * (kernel.begin_ns - free), COLOURS["exposed"])
        free = kernel.end_ns
    for _, spans, y in rows:
        for layer, span in enumerate(spans):
            yield from task(span, str(layer), at(span.begin_ns), y, scale)


def task(span: Span, text: str, x: float, y: int, scale: float) -> Iterator[str]:
    """A kernel or a copy."""
    colour = COLOURS["copy" if span.kind.is_copy else "compute"]
    yield from box(x, y, scale * (span.end_ns - span.begin_ns), colour, text)


def draw(panels: Sequence[tuple[str, Timeline]]) -> str:
    """A figure with a panel for each timeline, on one scale."""
    longest = max(span.end_ns for _, timeline in panels for span in timeline.spans)
    scale = (WIDE - LEFT) / longest
    height = 20 + 110 * len(panels) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDE + 20} {height}" '
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\" "
        'role="img" aria-labelledby="title">',
        f'<title id="title">Weights fetched into one buffer and into two. {TITLE}.</title>',
        f'<rect x="-10" width="{WIDE + 20}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (title, timeline) in enumerate(panels):
        lines += panel(timeline, title, 24 + 110 * number, scale)
    legend = f"Blue: kernels. Orange: copies. Pale: the compute stream waits. {TITLE}."
    lines.append(f'<text x="0" y="{height - 12}" font-style="italic">{legend}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Report and draw."""
    panels = [("one buffer", forward(1)), ("two buffers", forward(2))]
    reports = [f"{title}\n{timeline.report()}\n" for title, timeline in panels]
    sys.stdout.write("\n".join(reports))
    Path("prefetch-timeline.svg").write_text(draw(panels))


if __name__ == "__main__":
    main()
