"""The figure of gradient reduction's steps: lanes of kernels and of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ascend_sim import Timeline
from ascend_sim.spans import Kind, Span
from benchmarks.prefetch import LEFT, WIDE

__all__ = ["draw", "parted"]

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#2f4b7c",
    "optimizer": "#9ab8d8",
    "collective": "#6b8e23",
    "waits": "#f3d9d7",
}
LANE, TALL = 28, 22
_WAIT = 50_000  # nanoseconds: launches alone leave gaps of microseconds


class Sums(Protocol):
    """What is written beside a panel; see `ddp_timeline.Step`."""

    @property
    def makespan(self) -> float:
        """Of the step."""

    @property
    def hidden(self) -> float:
        """The share of communication that is hidden."""


class Block(NamedTuple):
    """Tasks that follow one another: the key of their colour, nanoseconds, and a text."""

    colour: str
    begin: int
    end: int
    text: str


def parted(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """What takes time, each with the part of the step that it is in, in the order of the device.

    The gradient of the loss, a filled tensor, begins backward.
    """
    part = "forward"
    work = (span for span in timeline.spans if span.kind.is_work and not span.kind.is_copy)
    for span in sorted(work, key=lambda span: (span.begin_ns, span.end_ns)):
        if span.kind is Kind.COLLECTIVE:
            yield "collective", span
            continue
        if part == "forward" and span.name == "aten::fill_.Scalar":
            part = "backward"
        if span.name.startswith("aten::_foreach"):
            part = "optimizer"
        yield part, span


def draw(panels: Sequence[tuple[str, Sums, Timeline]]) -> str:
    """A figure with a panel for each step, on one scale."""
    lanes = [_lanes(timeline) for _, _, timeline in panels]
    scale = (WIDE - LEFT) / max(
        b.end for panel in lanes for blocks in panel.values() for b in blocks
    )
    body, top = list[str](), 24
    for (title, sums, _), panel in zip(panels, lanes, strict=True):
        figures = f"{sums.makespan / 1000:.1f} ms, {sums.hidden:.0%} of communication hidden"
        body.append(f'<text x="0" y="{top}" font-weight="600">{title}: {figures}</text>')
        for name, blocks in panel.items():
            body.append(f'<text x="0" y="{top + 26}">{name}</text>')
            body += (_box(block, top + 10, scale) for block in blocks)
            top += LANE
        top += 40
    return "\n".join([*_head(top + 34), *body, *_legend(top), "</svg>", ""])


def _lanes(timeline: Timeline) -> dict[str, list[Block]]:
    compute, buckets = list[Block](), list[Block]()
    for part, span in parted(timeline):
        if part == "collective":
            # The last is the tally, which is next to nothing.
            buckets.append(Block(part, span.begin_ns, span.end_ns, str(len(buckets))))
            continue
        before = compute[-1].end if compute else 0
        if compute and span.begin_ns - before > _WAIT:
            compute.append(Block("waits", before, span.begin_ns, ""))
        if compute and compute[-1].colour == part:
            compute[-1] = compute[-1]._replace(end=span.end_ns)
        else:
            compute.append(Block(part, span.begin_ns, span.end_ns, ""))
    return {"compute": compute, "buckets": buckets}


def _head(height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDE + 20} {height}" '
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\" "
        'role="img" aria-labelledby="title">'
    )
    yield '<title id="title">A step of two ranks that average gradients. A model of time.</title>'
    yield f'<rect x="-10" width="{WIDE + 20}" height="{height}" fill="#ffffff"/>'


def _legend(top: int) -> Iterator[str]:
    x = 0
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="{top - 12}" width="14" height="14" rx="3" fill="{colour}"/>'
        yield f'<text x="{x + 20}" y="{top}">{name}</text>'
        x += 48 + 8 * len(name)
    said = "Numbers are those of buckets. A model of time on a simulated NPU, not an NPU's timing."
    yield f'<text x="0" y="{top + 22}" font-style="italic">{said}</text>'


def _box(block: Block, top: int, scale: float) -> str:
    x, width = LEFT + scale * block.begin, max(scale * (block.end - block.begin), 0.3)
    # A hair of white between neighbours.
    shape = f'x="{x:.1f}" y="{top}" width="{max(width - 0.8, 0.3):.1f}" height="{TALL}" rx="2"'
    drawn = f'<rect {shape} fill="{COLOURS[block.colour]}"/>'
    if not block.text or width < 14:
        return drawn
    place = f'x="{x + width / 2:.1f}" y="{top + 16}" text-anchor="middle" fill="#ffffff"'
    return f'{drawn}<text {place} font-size="12">{block.text}</text>'
