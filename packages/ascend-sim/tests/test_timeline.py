"""Reports and traces of timelines that are written down by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascend_sim import Report, Timeline
from ascend_sim.spans import Kind, Point, Span

COMPUTE, SIDE, OTHER = 0, 1, 2


class Script:
    """A timeline, task by task. Times are microseconds."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tickets: dict[int, int] = {}

    def task(self, kind: Kind, stream: int, submitted: int, begin: int, end: int) -> Point:
        self.tickets[stream] = self.tickets.get(stream, 0) + 1
        point = (stream, self.tickets[stream])
        self.add(kind, point, submitted, begin, end, None)
        return point

    def wait(self, stream: int, submitted: int, passed: int, after: Point) -> None:
        self.tickets[stream] = self.tickets.get(stream, 0) + 1
        self.add(Kind.WAIT, (stream, self.tickets[stream]), submitted, passed, passed, after)

    def host_waits(self, begin: int, end: int, point: Point) -> None:
        self.add(Kind.WAITING, point, begin, begin, end, None)

    def add(
        self, kind: Kind, point: Point, submitted: int, begin: int, end: int, after: Point | None
    ) -> None:
        self.spans.append(
            Span(
                name=kind.name,
                kind=kind,
                device=0,
                stream=point[0],
                ticket=point[1],
                after=after,
                bytes=1,
                flops=0,
                submitted_ns=1000 * submitted,
                begin_ns=1000 * begin,
                end_ns=1000 * end,
            )
        )

    def timeline(self) -> Timeline:
        timeline = Timeline(began_ns=0, launch_ns=1000)
        timeline.fill(self.spans, host_ns=10**9)
        return timeline

    def report(self) -> Report:
        return self.timeline().report()


def idle(report: Report) -> tuple[float, float]:
    return report.streams[0].transfer_idle_us, report.streams[0].other_idle_us


def test_waiting_for_a_copy_is_exposed_once_the_host_has_asked_for_more() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    copy = script.task(Kind.H2D, SIDE, 1, 1, 50)
    script.wait(COMPUTE, 20, 50, copy)
    script.task(Kind.KERNEL, COMPUTE, 21, 50, 60)
    # From 10 to 21 nothing had been submitted: idle anyway.
    assert idle(script.report()) == (50 - 21, 21 - 10)


def test_a_hidden_copy_is_not_exposed() -> None:
    script = Script()
    copy = script.task(Kind.H2D, SIDE, 0, 0, 30)
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 40)
    script.wait(COMPUTE, 1, 40, copy)
    script.task(Kind.KERNEL, COMPUTE, 2, 40, 50)
    assert idle(script.report()) == (0, 0)


def test_a_chain_of_streams_is_followed_to_what_works() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    offload = script.task(Kind.D2H, OTHER, 0, 0, 30)
    script.wait(SIDE, 0, 30, offload)
    kernel = script.task(Kind.KERNEL, SIDE, 0, 30, 45)
    script.wait(COMPUTE, 1, 45, kernel)
    script.task(Kind.KERNEL, COMPUTE, 2, 45, 100)
    # Until 30 the side stream waits for a copy, from 30 to 45 it computes.
    assert idle(script.report()) == (30 - 10, 45 - 30)


def test_waiting_for_a_copy_and_for_a_kernel_is_not_only_for_the_copy() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    copy = script.task(Kind.H2D, SIDE, 0, 0, 40)
    kernel = script.task(Kind.KERNEL, OTHER, 0, 0, 25)
    script.wait(COMPUTE, 1, 40, copy)
    script.wait(COMPUTE, 1, 40, kernel)
    script.task(Kind.KERNEL, COMPUTE, 2, 40, 100)
    assert idle(script.report()) == (40 - 25, 25 - 10)


def test_a_host_that_waits_for_a_copy_exposes_it() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    copy = script.task(Kind.D2H, SIDE, 1, 1, 50)
    script.host_waits(2, 50, copy)
    script.task(Kind.KERNEL, COMPUTE, 51, 51, 60)
    report = script.report()
    assert idle(report) == (50 - 10, 51 - 50)
    assert report.host_wait_us == 48


def test_a_copy_that_waits_for_its_engine_waits_for_a_copy() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    script.task(Kind.H2D, OTHER, 0, 0, 30)
    copy = script.task(Kind.H2D, SIDE, 1, 30, 50)
    script.wait(COMPUTE, 2, 50, copy)
    script.task(Kind.KERNEL, COMPUTE, 2, 50, 60)
    assert idle(script.report()) == (50 - 10, 0)


def test_a_copy_on_the_compute_stream_itself_is_exposed() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    script.task(Kind.H2D, COMPUTE, 1, 10, 30)
    script.task(Kind.KERNEL, COMPUTE, 2, 30, 40)
    report = script.report()
    assert idle(report) == (0, 0)
    assert report.exposed_transfer_us == 20


def test_waiting_for_a_collective_is_told_apart_from_waiting_for_a_copy() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    copy = script.task(Kind.H2D, OTHER, 0, 0, 30)
    collective = script.task(Kind.COLLECTIVE, SIDE, 0, 25, 60)  # until 25 another rank was late
    script.wait(COMPUTE, 0, 60, copy)
    script.wait(COMPUTE, 0, 60, collective)
    script.task(Kind.KERNEL, COMPUTE, 0, 60, 70)
    script.task(Kind.COLLECTIVE, COMPUTE, 0, 70, 90)
    report = script.report()
    compute = report.streams[0]
    # Until 30 it waits for both.
    assert (compute.transfer_idle_us, compute.collective_idle_us) == (0, 60 - 30)
    assert compute.other_idle_us == 30 - 10
    assert (compute.collective_us, compute.busy_us) == (20, 40)
    assert report.exposed_collective_us == 30 + 20
    assert report.exposed_transfer_us == 0


def test_the_compute_stream_is_the_one_with_the_most_kernels() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 1)
    script.task(Kind.KERNEL, SIDE, 0, 1, 10)
    script.task(Kind.H2D, OTHER, 0, 0, 90)
    report = script.report()
    assert [s.stream for s in report.streams] == [SIDE, COMPUTE, OTHER]
    assert [(s.kernel_us, s.copy_us, s.busy_us) for s in report.streams] == [
        (9, 0, 9),
        (1, 0, 1),
        (0, 90, 90),
    ]
    assert report.exposed_transfer_us == 0


def test_a_timeline_without_tasks_has_a_report() -> None:
    report = Script().report()
    assert (report.streams, report.exposed_transfer_us) == ((), 0)
    assert report.makespan_us == 10**6  # the host's


def test_a_report_says_that_it_is_a_model() -> None:
    script = Script()
    script.task(Kind.KERNEL, COMPUTE, 0, 0, 10)
    assert str(script.report()).endswith("not an NPU's timing.")


def test_the_drain_at_the_end_is_no_wait_of_the_programs() -> None:
    script = Script()
    kernel = script.task(Kind.KERNEL, COMPUTE, 100, 100, 200)
    script.host_waits(100, 200, kernel)
    timeline = Timeline(began_ns=100_000, launch_ns=0)
    timeline.fill(script.spans, host_ns=100_000)
    assert [(s.kind, s.begin_ns, s.end_ns) for s in timeline.spans] == [(Kind.KERNEL, 0, 100_000)]


# What the format's description ("Trace Event Format", by the authors of Chrome's viewer) demands of
# the phases that are used.
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "X": {"ts": (int, float), "dur": (int, float), "cat": (str,)},
    "M": {"args": (dict,)},
    "s": {"ts": (int, float), "cat": (str,), "id": (int, str)},
    "f": {"ts": (int, float), "cat": (str,), "id": (int, str)},
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_format(trace: dict[str, Any]) -> None:
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        for field, types in FIELDS[event["ph"]].items():
            assert isinstance(event[field], types), event
        assert event.get("dur", 0) >= 0
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]


@pytest.fixture
def trace(tmp_path: Path) -> dict[str, Any]:
    script = Script()
    copy = script.task(Kind.H2D, SIDE, 1, 1, 50)
    script.task(Kind.KERNEL, COMPUTE, 2, 2, 10)
    script.wait(COMPUTE, 3, 50, copy)
    kernel = script.task(Kind.KERNEL, COMPUTE, 4, 50, 60)
    script.host_waits(4, 60, kernel)
    script.task(Kind.COLLECTIVE, SIDE, 61, 61, 70)
    script.timeline().write_trace(tmp_path / "trace.json")
    read: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    return read


def test_a_trace_has_chromes_format(trace: dict[str, Any]) -> None:
    check_format(trace)
    assert "not an NPU's timing" in trace["otherData"]["note"]


def test_a_trace_has_a_row_for_each_stream_and_one_for_the_host(trace: dict[str, Any]) -> None:
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert named == {(0, 0): "submissions and waits", (1, 0): "stream 0", (1, 1): "stream 1"}
    drawn = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert drawn == named.keys()


def test_slices_of_a_row_follow_one_another(trace: dict[str, Any]) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            row = rows.setdefault((event["pid"], event["tid"]), [])
            row.append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(rows[1, 0]) == [(2, 10), (50, 60)]
    assert sorted(rows[0, 0]) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 60), (60, 61)]
    (collective,) = (e for e in trace["traceEvents"] if e.get("cat") == "collective")
    assert (collective["name"], collective["ts"], collective["dur"]) == ("COLLECTIVE", 61, 9)


def test_an_arrow_leads_from_the_copy_to_the_kernel_that_waited(trace: dict[str, Any]) -> None:
    arrows = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in arrows] == [
        ("s", 1, SIDE, 50),
        ("f", 1, COMPUTE, 50),
    ]
    assert len({e["id"] for e in arrows}) == 1
