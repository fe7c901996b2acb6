"""The trace event format of Chrome's trace viewer and of Perfetto.

A process is a device, and one more is the host; a thread is a stream. Tasks are complete events
(`ph` "X") with `ts` and `dur` in microseconds; names and order of rows are metadata events (`ph`
"M"); a wait of a stream is an arrow (`ph` "s" and "f") from the task that it waited for.
"""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ascend_sim.spans import Kind, Span

Event = dict[str, Any]

_HOST = {"pid": 0, "tid": 0}


def write(path: Path, spans: Sequence[Span], *, launch_ns: int, note: str) -> None:
    """Write a trace.

    Args:
        path: The file; what it had is lost.
        spans: With times since the trace's beginning.
        launch_ns: What a submission costs the host.
        note: To be seen in the viewer, with the trace's metadata.
    """
    trace = {
        "traceEvents": [*_names(spans), *_tasks(spans), *_host(spans, launch_ns), *_arrows(spans)],
        "displayTimeUnit": "ns",
        "otherData": {"note": note},
    }
    path.write_text(json.dumps(trace, indent=1))


def _place(span: Span) -> dict[str, int]:
    return {"pid": span.device + 1, "tid": span.stream}


def _shown(spans: Sequence[Span]) -> list[Span]:
    """Those that are drawn on a stream's row: what takes time."""
    return [span for span in spans if span.kind.is_work]


def _names(spans: Sequence[Span]) -> Iterator[Event]:
    rows = sorted({(span.device, span.stream) for span in _shown(spans)})
    yield _metadata("process_name", _HOST, {"name": "host (modelled)"})
    yield _metadata("thread_name", _HOST, {"name": "submissions and waits"})
    for device in sorted({device for device, _ in rows}):
        place = {"pid": device + 1, "tid": 0}
        yield _metadata("process_name", place, {"name": f"npu:{device} (modelled)"})
    for device, stream in rows:
        place = {"pid": device + 1, "tid": stream}
        yield _metadata("thread_name", place, {"name": f"stream {stream}"})
        yield _metadata("thread_sort_index", place, {"sort_index": stream})


def _metadata(name: str, place: dict[str, int], values: Event) -> Event:
    return {"name": name, "ph": "M", **place, "args": values}


def _complete(name: str, category: str, place: dict[str, int], begin: int, end: int) -> Event:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"name": name, "cat": category, "ph": "X", **times, **place}


def _tasks(spans: Sequence[Span]) -> Iterator[Event]:
    for span in _shown(spans):
        category = span.kind.name.lower()
        event = _complete(span.name, category, _place(span), span.begin_ns, span.end_ns)
        submitted = {"task": span.ticket, "submitted_us": span.submitted_ns / 1000}
        yield {**event, "args": {**submitted, "bytes": span.bytes, "flops": span.flops}}


def _host(spans: Sequence[Span], launch_ns: int) -> Iterator[Event]:
    for span in spans:
        if span.kind is Kind.WAITING:
            name = f"wait for stream {span.stream}"
            yield _complete(name, "waiting", _HOST, span.begin_ns, span.end_ns)
        elif launch_ns:
            begin = span.submitted_ns - launch_ns
            yield _complete(f"submit {span.name}", "submission", _HOST, begin, span.submitted_ns)


def _arrows(spans: Sequence[Span]) -> Iterator[Event]:
    """From the last work before an event to the work that waited for it."""
    work: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(_shown(spans), key=lambda span: span.ticket):
        work[span.stream].append(span)
    for number, wait in enumerate(span for span in spans if span.after is not None):
        assert wait.after is not None
        stream, ticket = wait.after
        cause = bisect.bisect_right(work[stream], ticket, key=lambda span: span.ticket) - 1
        effect = bisect.bisect_right(work[wait.stream], wait.ticket, key=lambda span: span.ticket)
        if cause >= 0 and effect < len(work[wait.stream]):
            arrow = {"name": "event", "cat": "wait", "id": number}
            start, end = work[stream][cause], work[wait.stream][effect]
            yield {**arrow, "ph": "s", **_place(start), "ts": start.end_ns / 1000}
            yield {**arrow, "ph": "f", "bp": "e", **_place(end), "ts": end.begin_ns / 1000}
