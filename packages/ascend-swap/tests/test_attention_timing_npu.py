"""How copies of activations overlap with compute on the modelled clock of the simulated NPU.

Compute is the forward of a layer; a copy is that of what a layer's attention saves, in one
direction, and takes as long in the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ascend_sim

ROOT = Path(__file__).resolve().parents[3]
LAYERS = 8
# Of copies in each direction, in 1e9 bytes per second, by the ratio of compute to copy.
SPEEDS = {0.5: 0.301, 1.0: 0.611, 2.0: 1.262}
SETTLED = 3  # the first step in which what it learnt shows, counted from 0

Steps = list[dict[str, Any]]

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None or running.config.schedule != "timed",
    reason="the clock is modelled under --npu-sim=timed alone",
)


@pytest.fixture(scope="module")
def taken() -> dict[float, dict[str, Steps]]:
    """What the benchmark reports, by ratio: steps by what was turned on."""
    programs = {ratio: _started(str(speed)) for ratio, speed in SPEEDS.items()}
    return {
        ratio: json.loads(program.communicate(timeout=500)[0])
        for ratio, program in programs.items()
    }


@pytest.mark.parametrize("ratio", SPEEDS)
def test_what_is_exposed_is_what_copies_take_beyond_compute(
    taken: dict[float, dict[str, Steps]], ratio: float
) -> None:
    ways = taken[ratio]
    plain = ways["plain"][-1]["makespan"]
    compute, copy = _layer(ways)
    assert compute / copy == pytest.approx(ratio, rel=0.01)
    for way in ("swap", "swap, keep_last=1"):
        for step in _settled(ways[way]):
            most = LAYERS * max(0.0, copy - compute) + 0.05 * step["makespan"]
            assert step["makespan"] - plain <= most
            assert step["exposed"] <= most
    for step in _settled(ways["swap, recompute_num_layers"]):
        # The MLPs' recomputation is compute.
        beyond = step["makespan"] - step["kernels"]
        assert beyond <= LAYERS * max(0.0, copy - compute) + 0.05 * step["makespan"]


@pytest.mark.parametrize("ratio", SPEEDS)
def test_keeping_what_was_late_leaves_no_more_exposed_than_the_link_is_too_slow(
    taken: dict[float, dict[str, Steps]], ratio: float
) -> None:
    for step in _settled(taken[ratio]["swap"]):
        too_slow = max(0.0, step["h2d"] + step["d2h"] - step["kernels"])
        assert step["exposed"] <= too_slow + 0.05 * step["makespan"]
    kept = taken[ratio]["swap"][-1]["kept"] / taken[ratio]["swap, keep_last=1"][-1]["kept"]
    assert kept == (1 if ratio >= 1 else 2)


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_a_step_takes_no_longer_than_with_full_recompute(
    taken: dict[float, dict[str, Steps]], ratio: float
) -> None:
    ways = taken[ratio]
    recomputed = ways["recompute"][-1]["makespan"]
    for way in ("swap", "swap, keep_last=1", "swap, recompute_num_layers"):
        assert all(step["makespan"] <= recomputed for step in _settled(ways[way]))


@pytest.mark.parametrize("ratio", SPEEDS)
def test_the_report_says_what_the_simulator_says(
    taken: dict[float, dict[str, Steps]], ratio: float
) -> None:
    for way, steps in taken[ratio].items():
        if way.startswith("swap"):
            for step in steps:
                assert step["reported"] == pytest.approx(
                    step["exposed"], rel=0.03, abs=0.002 * step["makespan"]
                )
    # The first step, in which nothing is known, exposes something.
    assert taken[ratio]["swap"][0]["reported"] > 0


@pytest.mark.parametrize("ratio", SPEEDS)
@pytest.mark.parametrize("schedule", ["pipeline", "accumulation"])
def test_micro_batches_find_their_tensors_there(
    taken: dict[float, dict[str, Steps]], ratio: float, schedule: str
) -> None:
    plain = taken[ratio][f"plain, {schedule}"][-1]["makespan"]
    steps = taken[ratio][f"swap, {schedule}"]
    assert steps[0]["hit_rate"] < 1
    assert all(step["hit_rate"] == 1 for step in steps[1:])
    assert steps[-1]["exposed"] <= 0.01 * plain
    assert steps[-1]["makespan"] <= 1.01 * plain


def _layer(ways: dict[str, Steps]) -> tuple[float, float]:
    """The forward of a layer, and the copy of what its attention saves."""
    plain, recomputed = (ways[way][-1]["kernels"] for way in ("plain", "recompute"))
    return (recomputed - plain) / LAYERS, ways["swap, keep_last=1"][-1]["d2h"] / (LAYERS - 1)


def _settled(steps: Steps) -> Steps:
    return steps[min(SETTLED, len(steps) - 1) :]


def _started(speed: str) -> subprocess.Popen[str]:
    """The benchmark, in a process of its own: a simulated NPU's speeds are those of its process."""
    program = [str(Path(sys.executable).with_name("ascend-sim")), "run", "--schedule", "timed"]
    program += ["--profile", "benchmarks/attention_timeline.toml"]
    program += ["--h2d-gbps", speed, "--d2h-gbps", speed, "-m", "benchmarks.attention_timeline"]
    # Of the device under test: its fills of poison would count as kernels.
    away = ("ASCENDSIM_HBM", "ASCENDSIM_POISON", "ASCENDSIM_TRACE")
    kept = {name: value for name, value in os.environ.items() if name not in away}
    return subprocess.Popen(program, cwd=ROOT, env=kept, stdout=subprocess.PIPE, text=True)
