"""How the windows of a step overlap on the modelled clock of the simulated NPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_sim

ROOT = Path(__file__).resolve().parents[3]
# Of copies in each direction, in 1e9 bytes per second, by the ratio of compute to copies.
SPEEDS = {0.5: 0.7155, 1.0: 1.492, 2.0: 3.264}

running = ascend_sim.current()


@pytest.mark.skipif(
    running is None or running.config.schedule != "timed",
    reason="the clock is modelled under --npu-sim=timed alone",
)
def test_a_step_takes_as_long_as_the_longest_of_its_phases() -> None:
    programs = {ratio: started(str(speed)) for ratio, speed in SPEEDS.items()}
    for ratio, program in programs.items():
        found = json.loads(program.communicate(timeout=500)[0])
        step, serial = found["overlapped"], found["serial"]
        assert step["compute"] / step["h2d"] == pytest.approx(ratio, rel=0.01)
        assert step["d2h"] == step["h2d"]
        assert step["makespan"] <= 1.05 * step["bound"]
        # One window after the other costs the sum.
        assert serial["makespan"] >= serial["h2d"] + serial["compute"] + serial["d2h"]


def started(speed: str) -> subprocess.Popen[str]:
    """The benchmark, in a process of its own: a simulated NPU's speeds are those of its process."""
    program = [str(Path(sys.executable).with_name("ascend-sim")), "run", "--schedule", "timed"]
    program += ["--profile", "benchmarks/swap_timeline.toml"]
    program += ["--h2d-gbps", speed, "--d2h-gbps", speed, "-m", "benchmarks.swap_timeline"]
    # Of the device under test: its fills of poison would count as kernels.
    away = ("ASCENDSIM_HBM", "ASCENDSIM_POISON", "ASCENDSIM_TRACE")
    kept = {name: value for name, value in os.environ.items() if name not in away}
    return subprocess.Popen(program, cwd=ROOT, env=kept, stdout=subprocess.PIPE, text=True)
