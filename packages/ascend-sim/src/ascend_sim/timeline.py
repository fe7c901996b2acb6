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
_ONLY_COLLECTIVES = frozenset({Cause.COLLECTIVE})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamReport:
    """What a stream did, in microseconds of the modelled clock.

    Attributes:
        device: The number of its device.
        stream: Its number.
        kernel_us: In which it ran kernels.
        copy_us: In which it copied.
        collective_us: In which it took part in collectives, all ranks being there.
        transfer_idle_us: In which it was idle, with work to come, only because of copies.
        collective_idle_us: The same, only because of collectives or of ranks that were late to one.
        other_idle_us: In which it was idle, with work to come, for another reason too.
    """

    device: int
    stream: int
    kernel_us: float
    copy_us: float
    collective_us: float
    transfer_idle_us: float
    collective_idle_us: float
    other_idle_us: float

    @property
    def busy_us(self) -> float:
        """In which it ran kernels, copied or took part in collectives."""
        return self.kernel_us + self.copy_us + self.collective_us


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

    @property
    def exposed_collective_us(self) -> float:
        """The same, only because of collectives and of ranks that were late to one."""
        compute = self.streams[:1]
        return sum(stream.collective_idle_us + stream.collective_us for stream in compute)

    def _columns(self) -> dict[str, list[str]]:
        """The table; what collectives take, only where there are any."""
        columns = {
            "stream": [
                f"{'compute' if i == 0 else 'side'} {s.stream} (npu:{s.device})"
                for i, s in enumerate(self.streams)
            ],
            "kernels": [_us(s.kernel_us) for s in self.streams],
            "copies": [_us(s.copy_us) for s in self.streams],
            "collectives": [_us(s.collective_us) for s in self.streams],
            "idle: transfer": [_us(s.transfer_idle_us) for s in self.streams],
            "idle: collective": [_us(s.collective_idle_us) for s in self.streams],
            "idle: other": [_us(s.other_idle_us) for s in self.streams],
        }
        if not self._has_collectives:
            del columns["collectives"], columns["idle: collective"]
        return columns

    @property
    def _has_collectives(self) -> bool:
        return any(stream.collective_us + stream.collective_idle_us for stream in self.streams)

    def __str__(self) -> str:
        table = self._columns()
        columns, rows = tuple(table), list(zip(*table.values(), strict=True))
        widths = [max(len(row[c]) for row in (columns, *rows)) for c in range(len(columns))]
        lines = [
            "  ".join(
                text.rjust(width) if c else text.ljust(width)
                for c, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (columns, *rows)
        ]
        totals = [
            f"makespan {_us(self.makespan_us)}",
            f"exposed transfer {_us(self.exposed_transfer_us)}",
            *(
                [f"exposed collectives {_us(self.exposed_collective_us)}"]
                if self._has_collectives
                else []
            ),
            f"the host waited {_us(self.host_wait_us)}",
        ]
        return "\n".join([*lines, ", ".join(totals), MODEL])


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
    exposed, collective = idle.get(_ONLY_TRANSFERS, 0), idle.get(_ONLY_COLLECTIVES, 0)
    copies = sum(task.end_ns - task.begin_ns for task in work if task.kind.is_copy)
    kernels, collectives = (
        sum(task.end_ns - task.begin_ns for task in work if task.kind is kind)
        for kind in (Kind.KERNEL, Kind.COLLECTIVE)
    )
    return StreamReport(
        device=work[0].device,
        stream=stream,
        kernel_us=kernels / 1000,
        copy_us=copies / 1000,
        collective_us=collectives / 1000,
        transfer_idle_us=exposed / 1000,
        collective_idle_us=collective / 1000,
        other_idle_us=(sum(idle.values()) - exposed - collective) / 1000,
    )


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs"
