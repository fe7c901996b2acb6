"""Races that the tracing of accesses finds: it names the tasks and the wait that is missing.

Whether a value went wrong does not matter: here the schedule is `eager`, where none does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_sim import Race, RefusedError, Simulator
from ascend_sim.races import Touch

Run = Callable[..., str]

pytestmark = pytest.mark.schedules("eager")

# Runs each of PROGRAMS, and prints the races of each.
RUN = """
import ascend_sim, json, sys
simulator = ascend_sim.start(schedule="eager", trace=True)
import torch
found = []
for program in PROGRAMS:
    main, side, other = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
    x, y = torch.zeros(4096, device="npu"), torch.zeros(4096, device="npu")
    host = torch.zeros(4096).pin_memory()
    torch.npu.synchronize()
    simulator.races()
    exec(program)
    found.append([
        (race.first.task, race.second.task, race.first.writes, race.second.writes, race.bytes)
        for race in simulator.races()
    ])
json.dump(found, sys.stdout)
"""

RACES = {
    "a consumer before the prefetch": (
        """
with torch.npu.stream(side):
    x.copy_(host, non_blocking=True)
{wait}
x.add_(1)
""",
        "main.wait_stream(side)",
        ["copy h2d", "aten::add_.Tensor", True, True, 16384],
    ),
    "a prefetch over a buffer in use": (
        """
y.copy_(x)
{wait}
with torch.npu.stream(side):
    x.copy_(host, non_blocking=True)
""",
        "side.wait_stream(main)",
        ["aten::copy_", "copy h2d", False, True, 16384],
    ),
    "a part of a tensor": (
        """
with torch.npu.stream(side):
    x[1024:2048].zero_()
{wait}
x[:1536].sum()
""",
        "main.wait_stream(side)",
        ["aten::zero_", "aten::sum", True, False, 2048],
    ),
    "a chain with a gap": (
        """
x.add_(1)
side.wait_stream(main)
{wait}
with torch.npu.stream(other):
    host.copy_(x, non_blocking=True)
""",
        "other.wait_stream(side)",
        ["aten::add_.Tensor", "copy d2h", True, False, 16384],
    ),
    "a block that is freed too early": (
        """
with torch.npu.stream(side):
    host.copy_(x, non_blocking=True)
{wait}
del x
x = torch.ones(4096, device="npu")
""",
        "x.record_stream(side)",
        ["copy d2h", "aten::fill_.Scalar", False, True, 16384],
    ),
    "an event that is recorded too early": (
        """
event = torch.npu.Event()
with torch.npu.stream(side):
    event.record()
    x.copy_(host, non_blocking=True)
    {wait}
event.synchronize()
x.sum()
""",
        "event.record()",
        ["copy h2d", "aten::sum", True, False, 16384],
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[object, object]]:
    """The races of each, without its wait and with it."""
    programs = [
        program.replace("{wait}", line)
        for program, wait, _ in RACES.values()
        for line in ("pass", wait)
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("PROGRAMS", repr(programs))],
        capture_output=True,
        text=True,
        check=True,
    )
    races = json.loads(done.stdout)
    return dict(zip(RACES, zip(races[::2], races[1::2], strict=True), strict=True))


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_and_its_tasks_are_named(
    name: str, found: dict[str, tuple[object, object]]
) -> None:
    assert found[name] == ([RACES[name][2]], [])


ORDERED = """
import ascend_sim
simulator = ascend_sim.start(schedule="eager", trace=True)
import torch
from torch import nn
side = torch.npu.Stream()
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
model.to("npu")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(3):
    x = torch.randn(32, 64).pin_memory().to("npu", non_blocking=True)
    y = model(x)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        kept = y.detach().to("cpu", non_blocking=True)
    y.record_stream(side)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del x, y
    side.synchronize()
assert simulator.races() == [], simulator.races()
"""


def test_a_training_step_with_all_its_waits_has_no_race(python: Run) -> None:
    python(ORDERED)


GRADIENTS = """
import ascend_sim, sys
simulator = ascend_sim.start(schedule="eager", trace=True)
import torch
from torch import distributed
distributed.init_process_group("hccl", init_method="file://{}/store", rank=0, world_size=1)
for waits in (False, True):
    gradient = torch.ones(4096, device="npu")
    torch.npu.synchronize()
    simulator.races()
    work = distributed.all_reduce(gradient, async_op=True)
    if waits:
        work.wait()
    gradient.mul_(0.5)
    for race in simulator.races():
        sys.stdout.write(f"{race.first.task}, {race.second.task}, {race.bytes}, {waits}\\n")
    work.wait()
distributed.destroy_process_group()
"""


def test_a_collective_that_nobody_waited_for_is_named(python: Run, tmp_path: Path) -> None:
    told = python(GRADIENTS.replace("{}", str(tmp_path), 1))
    assert told == "all_reduce, aten::mul_.Tensor, 16384, False\n"


def test_a_race_says_what_is_missing() -> None:
    race = Race(Touch("copy h2d", 5, 3, True), Touch("aten::mul", 0, 14, False), 0x1000, 64)
    assert str(race) == (
        "'aten::mul' (task 14 of stream 0) reads 64 bytes at 0x1000 that 'copy h2d' (task 3 of "
        "stream 5) writes: nothing orders the two.\n"
        "  missing  before 'aten::mul', stream 0 must wait for an event that stream 5 records "
        "after 'copy h2d'"
    )


def test_without_the_option_there_is_no_trace(npu_sim: Simulator) -> None:
    if npu_sim.config.trace:
        pytest.skip("the option is on")
    with pytest.raises(RefusedError, match="ASCENDSIM_TRACE=1"):
        npu_sim.races()


FAILING_TEST = """
import torch

def test_the_prefetch():
    side, host = torch.npu.Stream(), torch.ones(100).pin_memory()
    x = torch.zeros(100, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        x.copy_(host, non_blocking=True)
    assert x.eq(1).all().item()
"""


def test_a_failed_test_shows_its_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_mine.py").write_text(FAILING_TEST)
    monkeypatch.setenv("ASCENDSIM_TRACE", "1")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--npu-sim=lazy"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = " ".join(done.stdout.split())
    assert "races on the simulated NPU" in shown
    assert "missing before 'aten::eq.Scalar', stream 0 must wait for an event" in shown
