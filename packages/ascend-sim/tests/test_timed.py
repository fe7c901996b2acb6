"""The schedule `timed`: a modelled clock, to the microsecond.

The figures are computed by hand from profile.toml: a submission costs the host 5 µs; a kernel takes
2 µs and a µs per 1.2 MB; a copy takes 10 µs and a µs per 25 kB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from ascend_sim import Profile, RefusedError, Simulator, Timeline
from ascend_sim.profile import PUBLISHED
from ascend_sim.spans import Kind, Span

Run = Callable[..., str]

ROOT = Path(__file__).resolve().parents[3]

N = 3_000_000  # 12 MB: a copy takes 490 µs, a kernel that reads and writes them 22 µs
COPY, KERNEL, SUBMIT = 490, 22, 5

timed = pytest.mark.schedules("timed")


def npu() -> torch.Tensor:
    return torch.zeros(N, device="npu")


def pinned() -> torch.Tensor:
    return torch.zeros(N).pin_memory()


def times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(s.name, s.begin_ns / 1000, s.end_ns / 1000) for s in spans if s.kind.is_work]


def prefetch_and_offload(simulator: Simulator) -> Timeline:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x, y, host = npu(), npu(), pinned()
    torch.npu.synchronize()
    with simulator.timeline() as timeline:
        with torch.npu.stream(side):
            x.copy_(host, non_blocking=True)  # submitted at 5: from 5 to 495
        y.mul_(2)  # submitted at 10: from 10 to 32
        main.wait_stream(side)  # a record at 15, a wait at 20
        x.mul_(2)  # submitted at 25, waits for the copy: from 495 to 517
        main.synchronize()  # the host is at 517
        side.wait_stream(main)  # a record at 522, a wait at 527
        with torch.npu.stream(side):
            host.copy_(x, non_blocking=True)  # submitted at 532: from 532 to 1022
        side.synchronize()
    return timeline


@timed
def test_two_streams_are_exact(npu_sim: Simulator) -> None:
    assert npu_sim.config.rates() == Profile.read(PUBLISHED)
    timeline = prefetch_and_offload(npu_sim)
    assert times(timeline.spans) == [
        ("aten::mul_.Tensor", 10, 10 + KERNEL),
        ("copy h2d", 5, 5 + COPY),
        ("aten::mul_.Tensor", 495, 495 + KERNEL),
        ("copy d2h", 532, 532 + COPY),
    ]
    report = timeline.report()
    assert report.makespan_us == 1022
    assert report.host_wait_us == (517 - 25) + (1022 - 532)
    compute, side = report.streams
    assert (compute.kernel_us, compute.copy_us) == (2 * KERNEL, 0)
    # Idle from 0 to 10, when the host submits; from 32 to 495 for the copy. At the end it has
    # nothing left to do.
    assert (compute.transfer_idle_us, compute.other_idle_us) == (495 - 32, 10)
    assert (side.kernel_us, side.copy_us) == (0, 2 * COPY)
    assert report.exposed_transfer_us == 495 - 32


@timed
def test_it_is_the_same_from_run_to_run(npu_sim: Simulator) -> None:
    first, *others = (prefetch_and_offload(npu_sim) for _ in range(3))
    for other in others:
        assert times(other.spans) == times(first.spans)
        assert other.report().exposed_transfer_us == first.report().exposed_transfer_us


TRAINING = """
import ascend_sim, hashlib, sys
simulator = ascend_sim.start(schedule="timed")
import torch
from torch import nn
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)]
model = nn.Sequential(*layers).to("npu")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
side, host = torch.npu.Stream(), torch.empty(32, 64).pin_memory()
for step in range(3):
    with simulator.timeline() as timeline:
        output = model(torch.ones(32, 64, device="npu"))
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            host.copy_(output.detach(), non_blocking=True)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        side.synchronize()
    told = [(s.name, s.stream, s.submitted_ns, s.begin_ns, s.end_ns) for s in timeline.spans]
    sys.stdout.write(f"{len(told)} {hashlib.sha256(repr(told).encode()).hexdigest()}\\n")
"""


@timed
def test_a_training_step_takes_the_same_time_in_every_process(python: Run) -> None:
    first = python(TRAINING)
    assert all(int(line.split()[0]) >= 30 for line in first.splitlines())
    assert python(TRAINING) == first


@timed
def test_an_engine_serves_first_what_is_ready_first(npu_sim: Simulator) -> None:
    main, early, late = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
    x, y, a, b = npu(), npu(), pinned(), pinned()
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        x.mul_(2)  # from 5 to 27
        early.wait_stream(main)  # until 27
        with torch.npu.stream(early):
            x.copy_(a, non_blocking=True)  # submitted at 20
        with torch.npu.stream(late):
            y.copy_(b, non_blocking=True)  # submitted at 25, and ready
    assert times(timeline.spans) == [
        ("aten::mul_.Tensor", 5, 27),
        ("copy h2d", 25, 25 + COPY),
        ("copy h2d", 25 + COPY, 25 + 2 * COPY),
    ]


@timed
def test_directions_overlap_and_kernels_of_two_streams_do_not(npu_sim: Simulator) -> None:
    side, other = torch.npu.Stream(), torch.npu.Stream()
    x, y, a, b = npu(), npu(), pinned(), pinned()
    z, w = npu(), npu()
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        with torch.npu.stream(side):
            x.copy_(a, non_blocking=True)
            z.mul_(2)  # waits for the copy: its stream's
        with torch.npu.stream(other):
            b.copy_(y, non_blocking=True)
        w.mul_(2)
    assert times(timeline.spans) == [
        ("aten::mul_.Tensor", 20, 20 + KERNEL),
        ("copy h2d", 5, 5 + COPY),
        ("copy d2h", 15, 15 + COPY),
        ("aten::mul_.Tensor", 5 + COPY, 5 + COPY + KERNEL),
    ]
    with npu_sim.timeline() as timeline:
        z.mul_(2)
        with torch.npu.stream(side):
            w.mul_(2)
    assert times(timeline.spans) == [
        ("aten::mul_.Tensor", 5, 5 + KERNEL),
        ("aten::mul_.Tensor", 5 + KERNEL, 5 + 2 * KERNEL),
    ]


@timed
def test_a_query_compares_with_the_hosts_clock(npu_sim: Simulator) -> None:
    x, y, host, done = npu(), torch.zeros(1, device="npu"), pinned(), torch.npu.Event()
    torch.npu.synchronize()
    with npu_sim.timeline():
        host.copy_(x, non_blocking=True)  # from 5 to 495
        done.record()
        answers = []
        for _ in range(100):  # the i-th is submitted at 15 + 5 i
            with torch.npu.stream(torch.npu.Stream()):
                y.add_(1)
            answers.append(done.query())
    assert answers.index(True) == (495 - 15) / SUBMIT
    assert answers == sorted(answers)


@timed
def test_a_polling_loop_ends_at_the_completion(npu_sim: Simulator) -> None:
    x, host, done = npu(), pinned(), torch.npu.Event()
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        host.copy_(x, non_blocking=True)  # from 5 to 495
        done.record()
        while not done.query():
            pass
    assert timeline.report().makespan_us == 495
    assert timeline.report().host_wait_us == 495 - 10


@timed
def test_bytes_move_when_the_copy_ends(npu_sim: Simulator) -> None:
    x, y, host, side = npu().add_(1), npu(), pinned(), torch.npu.Stream()
    torch.npu.synchronize()
    host.copy_(x, non_blocking=True)
    assert host.eq(0).all()
    while not host[0]:  # a submission moves the host's clock
        with torch.npu.stream(side):
            y.add_(1)
    assert host.eq(1).all()


@timed
def test_elapsed_time_is_of_the_modelled_clock(npu_sim: Simulator) -> None:
    x = npu()
    torch.npu.synchronize()
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x.mul_(2)  # submitted 5 µs later
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx((SUBMIT + KERNEL) / 1000)


@timed
def test_a_copy_from_pageable_memory_holds_the_host_up(npu_sim: Simulator) -> None:
    x, host = npu(), torch.zeros(N)
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        x.copy_(host)
    assert timeline.report().host_wait_us == COPY
    assert [s.kind for s in timeline.spans if s.kind.is_work] == [Kind.H2D]


@timed
def test_the_allocator_compares_with_the_hosts_clock(npu_sim: Simulator) -> None:
    def reuses(microseconds: int) -> bool:
        """Whether a block that a side stream copies for 490 µs is free that much later."""
        side, host, clock = torch.npu.Stream(), pinned(), torch.zeros(1, device="npu")
        x = npu()
        torch.npu.synchronize()
        address = x.data_ptr()
        with torch.npu.stream(side):
            host.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x
        for _ in range(microseconds // SUBMIT):
            clock.add_(1)
        found = torch.empty(N, device="npu").data_ptr() == address
        torch.npu.synchronize()
        torch.npu.empty_cache()
        return found

    assert not reuses(COPY - 20)
    assert reuses(COPY + 20)


@timed
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(8, 16), (16, 32)]),
        (torch.bmm, [(2, 8, 16), (2, 16, 32)]),
        (torch.addmm, [(32,), (8, 16), (16, 32)]),
        (torch.baddbmm, [(2, 8, 32), (2, 8, 16), (2, 16, 32)]),
        (torch.matmul, [(2, 8, 16), (16, 32)]),
        (functional.linear, [(4, 8, 16), (32, 16), (32,)]),
        (functional.conv2d, [(2, 6, 10, 10), (8, 6, 3, 3), (8,)]),
        (functional.conv_transpose2d, [(2, 6, 10, 10), (6, 8, 3, 3), (8,)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_flops_are_counted_as_torch_counts_them(
    function: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], npu_sim: Simulator
) -> None:
    def step(device: str) -> None:
        inputs = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
        function(*inputs).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step("cpu")
    with npu_sim.timeline() as timeline:
        step("npu")
    assert counter.get_total_flops() > 0
    assert sum(span.flops for span in timeline.spans) == counter.get_total_flops()


@timed
def test_flops_of_attention_are_those_of_its_matmuls(npu_sim: Simulator) -> None:
    shape = (2, 4, 32, 16)
    q, k, v = (torch.ones(shape, device="npu", requires_grad=True) for _ in range(3))
    with npu_sim.timeline() as timeline:
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    forward, backward = (span.flops for span in timeline.spans if span.flops)
    assert forward == sdpa_flop_count(shape, shape, shape)
    assert backward == sdpa_backward_flop_count(shape, shape, shape, shape)


@timed
@pytest.mark.parametrize(("dtype", "tflops"), [(torch.float32, 60), (torch.bfloat16, 250)])
def test_a_matmul_takes_as_long_as_its_flops(
    dtype: torch.dtype, tflops: int, npu_sim: Simulator
) -> None:
    a = torch.zeros(600, 1000, dtype=dtype, device="npu")
    b = torch.zeros(1000, 500, dtype=dtype, device="npu")
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        torch.mm(a, b)
    (kernel,) = (span for span in timeline.spans if span.kind is Kind.KERNEL)
    assert kernel.flops == 600_000_000
    assert kernel.end_ns - kernel.begin_ns == 2000 + 600_000 // tflops


@timed
def test_an_operator_that_waits_for_its_result_takes_its_time_too(npu_sim: Simulator) -> None:
    x = npu()
    torch.npu.synchronize()
    with npu_sim.timeline() as timeline:
        x.nonzero()
    # It reads 12 MB. How much it writes, nobody knows before.
    assert times(timeline.spans) == [("aten::nonzero", 5, 17)]
    assert timeline.report().host_wait_us == 12


@timed
def test_timelines_do_not_nest(npu_sim: Simulator) -> None:
    with npu_sim.timeline() as timeline:
        with pytest.raises(RefusedError, match="kept already"), npu_sim.timeline():
            pass
        torch.zeros(1, device="npu")
    assert len(timeline.spans) == 1
    with npu_sim.timeline() as timeline:
        pass
    assert timeline.spans == []


@timed
def test_a_real_trace_can_be_read(npu_sim: Simulator, tmp_path: Path) -> None:
    timeline = prefetch_and_offload(npu_sim)
    timeline.write_trace(tmp_path / "trace.json")
    trace: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in drawn] == times(timeline.spans)


@timed
def test_the_published_figure_and_reports_are_what_the_model_says(
    python: Run, tmp_path: Path
) -> None:
    program = (
        "import ascend_sim; ascend_sim.start(); from benchmarks import prefetch as p; p.main()"
    )
    told = python(program, PYTHONPATH=str(ROOT))
    page = (ROOT / "docs/ascend-sim.md").read_text()
    assert told in page
    drawn = (tmp_path / "prefetch-timeline.svg").read_text()
    assert drawn == (ROOT / "docs/figures/prefetch-timeline.svg").read_text()


@pytest.mark.schedules("eager", "thread", "lazy", "early", "random")
def test_other_schedules_have_no_timeline(npu_sim: Simulator) -> None:
    with pytest.raises(RefusedError, match="no timeline"), npu_sim.timeline():
        pass
