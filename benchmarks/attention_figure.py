"""The figure of swap-attention's steps: lanes of copies and kernels, with the layers' numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ascend_sim import Timeline
from ascend_sim.spans import Kind, Span
from benchmarks.prefetch import LEFT, WIDE

__all__ = ["draw"]

COLOURS = {
    "forward": "#4c78a8",
    "forward again": "#9ab8d8",
    "backward": "#2f4b7c",
    "to the host": "#6b8e23",
    "back": "#b8651b",
    "waits for copies": "#f3d9d7",
}
LANE, TALL = 28, 22
_NORM_BACKWARD = "aten::native_layer_norm_backward"


class Sums(Protocol):
    """What is written beside a panel; see `attention_timeline.Step`."""

    @property
    def makespan(self) -> float:
        """Of the step."""

    @property
    def exposed(self) -> float:
        """Exposed transfer."""


class Block(NamedTuple):
    """Tasks of one layer that follow one another.

    Attributes:
        colour: The key of its colour.
        layer: The number of the layer; None where it is none's.
        begin: In nanoseconds.
        end: In nanoseconds.
    """

    colour: str
    layer: int | None
    begin: int
    end: int


def draw(panels: Sequence[tuple[str, Sums, Timeline]]) -> str:
    """A figure with a panel for each step, on one scale."""
    lanes = [list(_lanes(timeline)) for _, _, timeline in panels]
    shown = [block for panel in lanes for _, blocks in panel for block in blocks]
    scale = (WIDE - LEFT) / max(block.end for block in shown)
    used = {block.colour for block in shown}
    body, top = list[str](), 24
    for (title, sums, _), panel in zip(panels, lanes, strict=True):
        figures = f"{sums.makespan / 1000:.1f} ms"
        figures += f", of which {sums.exposed / 1000:.1f} ms wait for copies" * (sums.exposed > 0)
        body.append(f'<text x="0" y="{top}" font-weight="600">{title}: {figures}</text>')
        for name, blocks in panel:
            body.append(f'<text x="0" y="{top + 26}">{name}</text>')
            body += (_box(block, top + 10, scale) for block in blocks)
            top += LANE
        top += 40
    return "\n".join([*_head(top + 34), *body, *_legend(used, top), "</svg>", ""])


def _head(height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDE + 20} {height}" '
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\" "
        'role="img" aria-labelledby="title">'
    )
    yield '<title id="title">A training step with swap-attention. A model of time.</title>'
    yield f'<rect x="-10" width="{WIDE + 20}" height="{height}" fill="#ffffff"/>'


def _legend(used: set[str], top: int) -> Iterator[str]:
    x = 0
    for name, colour in COLOURS.items():
        if name not in used:
            continue
        yield f'<rect x="{x}" y="{top - 12}" width="14" height="14" rx="3" fill="{colour}"/>'
        yield f'<text x="{x + 20}" y="{top}">{name}</text>'
        x += 48 + 8 * len(name)
    said = "Numbers are those of layers. A model of time on a simulated NPU, not an NPU's timing."
    yield f'<text x="0" y="{top + 22}" font-style="italic">{said}</text>'


def _lanes(timeline: Timeline) -> Iterator[tuple[str, list[Block]]]:
    spans = timeline.spans
    out, back = ([s for s in spans if s.kind is kind] for kind in (Kind.D2H, Kind.H2D))
    layers = len(out) // _copies_of_a_layer(out) if out else 0
    if out:
        yield "to the host", list(_copies("to the host", out, list(range(layers))))
    yield "compute", list(_computed([s for s in spans if s.kind is Kind.KERNEL]))
    if back:
        yield "back", list(_copies("back", back, list(reversed(range(layers)))))


def _copies_of_a_layer(copies: Sequence[Span]) -> int:
    """All layers are alike, and so are the sizes of their copies."""
    sizes = [span.bytes for span in copies]
    return next(n for n in range(1, len(sizes) + 1) if sizes == sizes[:n] * (len(sizes) // n))


def _copies(colour: str, copies: Sequence[Span], layers: Sequence[int]) -> Iterator[Block]:
    each = len(copies) // len(layers)
    for number, layer in enumerate(layers):
        mine = copies[number * each : (number + 1) * each]
        yield Block(colour, layer, mine[0].begin_ns, mine[-1].end_ns)


def _computed(kernels: Sequence[Span]) -> Iterator[Block]:
    """Kernels by layer, and the waits between them."""
    run: Block | None = None
    for (colour, layer), kernel in zip(_places(kernels), kernels, strict=True):
        # Launches alone leave gaps of microseconds.
        waits = kernel.begin_ns - (0 if run is None else run.end) > 50_000
        if run is not None and run[:2] == (colour, layer) and not waits:
            run = run._replace(end=kernel.end_ns)
            continue
        if run is not None:
            yield run
        if waits:
            yield Block("waits for copies", None, 0 if run is None else run.end, kernel.begin_ns)
        run = Block(colour, layer, kernel.begin_ns, kernel.end_ns)
    if run is not None:
        yield run


def _places(kernels: Sequence[Span]) -> Iterator[tuple[str, int]]:
    """Whether a kernel runs forward or backward, and in which layer.

    A layer begins with a norm and has two. Its backward ends with that of the first, behind which
    a gradient is added. What is recomputed runs forward again.
    """
    norms = layers = ended = 0
    colour, before = "forward", ""
    for kernel in kernels:
        if kernel.name == "aten::fill_.Scalar":  # the gradient of the loss
            layers = norms // 2
        if kernel.name == "aten::native_layer_norm":
            norms, colour = norms + 1, "forward again" if layers else "forward"
        elif layers and kernel.name == "aten::mm":
            colour = "backward"
        yield colour, layers - 1 - ended // 2 if layers else (norms - 1) // 2
        ended += before == _NORM_BACKWARD
        before = kernel.name


def _box(block: Block, top: int, scale: float) -> str:
    x, width = LEFT + scale * block.begin, max(scale * (block.end - block.begin), 0.3)
    # A hair of white between neighbours.
    shape = f'x="{x:.1f}" y="{top}" width="{max(width - 0.8, 0.3):.1f}" height="{TALL}" rx="2"'
    drawn = f'<rect {shape} fill="{COLOURS[block.colour]}"/>'
    if block.layer is None or width < 14:
        return drawn
    place = f'x="{x + width / 2:.1f}" y="{top + 16}" text-anchor="middle" fill="#ffffff"'
    return f'{drawn}<text {place} font-size="12">{block.layer}</text>'
