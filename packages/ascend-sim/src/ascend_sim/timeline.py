"""A stretch of the modelled clock: its report, and its trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ascend_sim import chrome
from ascend_sim.idle import Cause, Idleness
from ascend_sim.spans import Kind, Span

MODEL = (
    "This is a model of time, from the rates and latencies of a profile, and not an NPU's timing."
)

_ONLY_TRANSFERS = frozenset({Cause.TRANSFER})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """What a stream did, in microseconds of the modelled clock.

    Attributes:
        device: The number of its device.
        stream: Its number.
        kernel_us: In which it ran kernels.
        copy_us: In which it copied.
        transfer_idle_us: In which it was idle, with work to come, only because of copies.
        other_idle_us: In which it was idle, with work to come, for another reason too.
    """

    device: int
    stream: int
    kernel_us: float
    copy_us: float
    transfer_idle_us: float
    other_idle_us: float

    @property
    def busy_us(self) -> float:
        """In which it ran kernels or copied."""
        return self.kernel_us + self.copy_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What happened on a timeline: a model, and not an NPU's timing.

    Attributes:
        makespan_us: From the beginning to the last completion, or to the host's last moment.
        host_wait_us: In which the host waited in synchronisations.
        streams: Those that worked. The first is the compute stream: that with the most kernel time.
    """

    makespan_us: float
    host_wait_us: float
    streams: tuple[StreamReport, ...]

    @property
    def exposed_transfer_us(self) -> float:
        """In which the compute stream did not compute only because of copies.

        It was idle, with work to come, and waited for nothing but copies, or it copied itself. What
        follows its last task is not counted: look at the makespan.
        """
        compute = self.streams[:1]
        return sum(stream.transfer_idle_us + stream.copy_us for stream in compute)

    def __str__(self) -> str:
        columns = ("stream", "kernels", "copies", "idle: transfer", "idle: other")
        rows = [
            (
                f"{'compute' if i == 0 else 'side'} {s.stream} (npu:{s.device})",
                *(_us(t) for t in (s.kernel_us, s.copy_us, s.transfer_idle_us, s.other_idle_us)),
            )
            for i, s in enumerate(self.streams)
        ]
        widths = [max(len(row[c]) for row in (columns, *rows)) for c in range(len(columns))]
        lines = [
            "  ".join(
                text.rjust(width) if c else text.ljust(width)
                for c, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (columns, *rows)
        ]
        totals = [
            f"makespan {_us(self.makespan_us)}, exposed transfer {_us(self.exposed_transfer_us)}, "
            f"the host waited {_us(self.host_wait_us)}"
        ]
        return "\n".join([*lines, *totals, MODEL])


class Timeline:
    """What happened within a block of `Simulator.timeline`.

    Attributes:
        spans: Tasks and waits of the host, in the order in which they ended. Times are nanoseconds
            since the block began. Empty until the block has ended.
    """

    def __init__(self, began_ns: int, launch_ns: int) -> None:
        self.spans: list[Span] = []
        self._began_ns = began_ns
        self._launch_ns = launch_ns
        self._host_ns = 0

    def fill(self, spans: Sequence[Span], host_ns: int) -> None:
        """Take what the runtime has kept. Called when the block has ended.

        Args:
            spans: With times of the modelled clock.
            host_ns: The host's clock when the block ended.
        """
        self._host_ns = host_ns - self._began_ns
        since = [
            dataclasses.replace(
                span,
                submitted_ns=span.submitted_ns - self._began_ns,
                begin_ns=span.begin_ns - self._began_ns,
                end_ns=span.end_ns - self._began_ns,
            )
            for span in spans
        ]
        # The drain that follows the block is no wait of the program's.
        self.spans = [
            span for span in since if span.kind is not Kind.WAITING or span.end_ns <= self._host_ns
        ]

    def report(self) -> Report:
        """Sum the spans up."""
        idleness = Idleness(self.spans)
        streams = [_report_of(idleness, stream) for stream in idleness.streams()]
        streams.sort(key=lambda s: (-s.kernel_us, s.stream))
        waits = [span for span in self.spans if span.kind is Kind.WAITING]
        return Report(
            makespan_us=max([self._host_ns, *(span.end_ns for span in self.spans)]) / 1000,
            host_wait_us=sum(span.end_ns - span.begin_ns for span in waits) / 1000,
            streams=tuple(streams),
        )

    def write_trace(self, path: str | Path) -> None:
        """Write a trace that chrome://tracing and Perfetto open: JSON, one row per stream."""
        chrome.write(Path(path), self.spans, launch_ns=self._launch_ns, note=MODEL)


def _report_of(idleness: Idleness, stream: int) -> StreamReport:
    work = idleness.work(stream)
    idle = idleness.idle_ns(stream)
    exposed = idle.get(_ONLY_TRANSFERS, 0)
    copies = sum(task.end_ns - task.begin_ns for task in work if task.kind.is_copy)
    kernels = sum(task.end_ns - task.begin_ns for task in work if not task.kind.is_copy)
    return StreamReport(
        device=work[0].device,
        stream=stream,
        kernel_us=kernels / 1000,
        copy_us=copies / 1000,
        transfer_idle_us=exposed / 1000,
        other_idle_us=(sum(idle.values()) - exposed) / 1000,
    )


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs"
