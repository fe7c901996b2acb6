"""Why a stream does nothing: pure functions of spans.

[Note: what an idle stream waits for]

At an idle moment of a stream, its next piece of work is held up by all of these that apply:

    - an event that it must wait for and that is not reached: then by whatever holds up the stream
      of that event
    - the host, which has not submitted it yet: by whatever the host synchronises with at that
      moment, or else by the host's own work
    - its engine, which is taken: by the piece of work that has it

Followed to its end, each of them is a copy, a collective (or its wait for other ranks), a kernel or
the host. Where *all* are copies, the moment is exposed transfer time: without the transfers the
stream would work. Where one is not, the stream would be idle anyway. Collectives likewise.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ascend_sim.spans import Kind, Point, Span


class Cause(enum.Enum):
    """What holds a stream up."""

    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    KERNEL = "kernel"
    HOST = "host"


class Idleness:
    """Says of any moment what holds a stream up.

    Args:
        spans: All of a timeline.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        tasks = [span for span in spans if span.kind is not Kind.WAITING]
        self._tasks = _by_stream(tasks)
        self._work = _by_stream(span for span in tasks if span.kind.is_work)
        self._ends = {stream: [t.end_ns for t in tasks] for stream, tasks in self._tasks.items()}
        self._work_ends = {s: [t.end_ns for t in tasks] for s, tasks in self._work.items()}
        self._end_of = {(task.stream, task.ticket): task.end_ns for task in tasks}
        self._syncs = sorted(
            (span for span in spans if span.kind is Kind.WAITING), key=lambda span: span.begin_ns
        )
        self._sync_ends = [span.end_ns for span in self._syncs]
        # When something begins to hold a stream up, or ceases to.
        self._moments = sorted(
            {ns for span in spans for ns in (span.submitted_ns, span.begin_ns, span.end_ns)}
        )

    def streams(self) -> list[int]:
        """Number the streams that have work."""
        return sorted(self._work)

    def work(self, stream: int) -> list[Span]:
        """The kernels and copies of a stream, in order."""
        return self._work[stream]

    def idle_ns(self, stream: int) -> dict[frozenset[Cause], int]:
        """Idle nanoseconds of a stream before its last piece of work, by all that held it up."""
        times: dict[frozenset[Cause], int] = defaultdict(int)
        for begin, end in self._gaps(stream):
            times[frozenset(self._causes(stream, begin))] += end - begin
        return dict(times)

    def _gaps(self, stream: int) -> Iterator[tuple[int, int]]:
        """Idle stretches of a stream, cut where what holds it up may change."""
        free = 0
        for task in self._work[stream]:
            first = bisect.bisect_right(self._moments, free)
            last = bisect.bisect_left(self._moments, task.begin_ns)
            cuts = [free, *self._moments[first:last], task.begin_ns]
            yield from ((a, b) for a, b in itertools.pairwise(cuts) if a < b)
            free = task.end_ns

    def _causes(self, stream: int, now: int, ticket: int | None = None) -> Iterator[Cause]:
        """What holds up the next work of a stream, or its task `ticket`, at an idle moment.

        Here, and in what this calls, a thing that ends at `now` has ended.
        """
        upcoming = self._upcoming(stream, now, ticket)
        waits = [w.after for w in upcoming if w.after and self._end_of.get(w.after, 0) > now]
        for point in waits:
            yield from self._causes_of(point, now)
        goal = upcoming[-1]
        if goal.submitted_ns > now:
            yield from self._causes_at_host(now)
        elif not waits and goal.kind.is_work:
            yield _cause_of(goal)  # it has its engine, or it waits for other ranks

    def _upcoming(self, stream: int, now: int, ticket: int | None) -> list[Span]:
        """The tasks of a stream from the first that has not ended to the next work or `ticket`."""
        tasks = self._tasks[stream]
        first = last = bisect.bisect_right(self._ends[stream], now)
        while not tasks[last].kind.is_work and tasks[last].ticket != ticket:
            last += 1
        return tasks[first : last + 1]

    def _causes_of(self, point: Point, now: int) -> Iterator[Cause]:
        """What keeps a point, which is not reached, from being reached."""
        stream, ticket = point
        work = self._work.get(stream, [])
        running = bisect.bisect_right(self._work_ends.get(stream, []), now)
        if running < len(work) and work[running].begin_ns <= now:
            yield _cause_of(work[running])
        else:
            yield from self._causes(stream, now, ticket)

    def _causes_at_host(self, now: int) -> Iterator[Cause]:
        at = bisect.bisect_right(self._sync_ends, now)
        if at < len(self._syncs) and self._syncs[at].begin_ns <= now:
            sync = self._syncs[at]
            yield from self._causes_of((sync.stream, sync.ticket), now)
        else:
            yield Cause.HOST


def _cause_of(work: Span) -> Cause:
    if work.kind is Kind.COLLECTIVE:
        return Cause.COLLECTIVE
    return Cause.TRANSFER if work.kind.is_copy else Cause.KERNEL


def _by_stream(tasks: Iterable[Span]) -> dict[int, list[Span]]:
    streams: dict[int, list[Span]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: (task.stream, task.ticket)):
        streams[task.stream].append(task)
    return dict(streams)
