"""Times the variants of a case against its baseline, on a machine that others use too."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ascend_core.device import current_backend
from benchmarks.case import Case, Variant

__all__ = ["SPREAD", "Ratio", "Row", "Times", "median_with_spread", "run_case"]

SPREAD = "distribution-free 95 % confidence interval of the median ratio (order statistics)"
_CONFIDENCE = 0.95


@dataclasses.dataclass
class Times:
    """Seconds of one variant, one entry per round: elapsed, and spent by all of our threads."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Time against the baseline's in the same round: the median over the rounds, and its spread."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured for one variant.

    Attributes:
        benchmark: Name of the benchmark.
        case: Name of the case.
        variant: Name of the variant.
        baseline: Name of the variant it is compared with.
        ratio: Its time divided by the baseline's, by `clock`: median over the rounds.
        ratio_low: Lower end of the spread, see `SPREAD`.
        ratio_high: Upper end of it.
        clock: `"cpu"` (time spent by all threads of this process: other processes do not
            disturb it) without an accelerator, else `"wall"`.
        wall_ratio: The same three by elapsed time.
        cpu_ratio: The same three by time spent.
        seconds: Median elapsed time of a step.
        rounds: How often it ran.
        bytes: What `Variant.measure_bytes` returned; None when the case measures none.
        bytes_are: What the bytes mean.
    """

    benchmark: str
    case: str
    variant: str
    baseline: str
    ratio: float
    ratio_low: float
    ratio_high: float
    clock: str
    wall_ratio: Ratio
    cpu_ratio: Ratio
    seconds: float
    rounds: int
    bytes: int | None
    bytes_are: str


def run_case(benchmark: str, case: Case, *, rounds: int | None = None) -> list[Row]:
    """Time and measure every variant of a case.

    Every round runs each variant once, in turns forwards and backwards, so that a disturbance
    meets all of them alike; a variant's ratio is taken within each round. Garbage is collected
    before each step, and not during it.

    Args:
        benchmark: Name for the rows.
        case: What to run.
        rounds: Instead of the case's own.
    """
    with case.around():
        variants = case.build()
        for variant in variants.values():
            for _ in range(case.warmup):
                variant.step()
        times = _time_rounds(variants, rounds or case.rounds)
        sizes = {name: _bytes_of(variant) for name, variant in variants.items()}
    clock = "cpu" if current_backend().name == "cpu" else "wall"
    rows = []
    for name in variants:
        wall = _ratio(times[name].wall, times[case.baseline].wall)
        cpu = _ratio(times[name].cpu, times[case.baseline].cpu)
        chosen = cpu if clock == "cpu" else wall
        row = Row(
            benchmark=benchmark,
            case=case.name,
            variant=name,
            baseline=case.baseline,
            ratio=chosen.median,
            ratio_low=chosen.low,
            ratio_high=chosen.high,
            clock=clock,
            wall_ratio=wall,
            cpu_ratio=cpu,
            seconds=statistics.median(times[name].wall),
            rounds=len(times[name].wall),
            bytes=sizes[name],
            bytes_are=case.bytes_are,
        )
        rows.append(row)
    return rows


def _bytes_of(variant: Variant) -> int | None:
    return variant.measure_bytes() if variant.measure_bytes else None


def median_with_spread(values: Sequence[float]) -> Ratio:
    """The median of some values, and the interval that holds the true median with 95 %.

    The interval runs from the k-th lowest to the k-th highest value, for the largest k at which a
    fair coin gives fewer than k heads in n throws with at most 2.5 %. Below 6 values there is no
    such k, and it runs over all of them.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail = 0.0
    skip = 0
    for heads in range(count // 2):
        tail += math.comb(count, heads) / 2**count
        if tail > (1 - _CONFIDENCE) / 2:
            break
        skip = heads
    return Ratio(statistics.median(ordered), ordered[skip], ordered[-1 - skip])


def _ratio(times: Sequence[float], baseline: Sequence[float]) -> Ratio:
    tick = 1e-9  # a step below the clock's resolution would divide by zero
    return median_with_spread([a / max(b, tick) for a, b in zip(times, baseline, strict=True)])


def _time_rounds(variants: Mapping[str, Variant], rounds: int) -> dict[str, Times]:
    times = {name: Times() for name in variants}
    order = list(variants)
    for _ in range(rounds):
        for name in order:
            with _clocks(times[name]):
                variants[name].step()
        order.reverse()
    return times


@contextmanager
def _clocks(times: Times) -> Iterator[None]:
    backend = current_backend()
    gc.collect()
    gc.disable()
    backend.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
        backend.synchronize()
        times.wall.append(time.perf_counter() - wall)
        times.cpu.append(time.process_time() - cpu)
    finally:
        gc.enable()
