"""How communication overlaps with backward on the modelled clock of two simulated NPUs."""

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
BUCKETS = 16

Steps = list[dict[str, Any]]

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None or running.config.schedule != "timed",
    reason="the clock is modelled under --npu-sim=timed alone",
)


@pytest.fixture(scope="module")
def taken() -> dict[str, Steps]:
    """What the benchmark reports, by what was turned on."""
    program = [str(Path(sys.executable).with_name("ascend-sim")), "run", "--schedule", "timed"]
    program += ["--devices", "2", "--profile", "benchmarks/ddp_timeline.toml"]
    program += ["-m", "benchmarks.ddp_timeline"]
    # Of the device under test: its fills of poison would count as kernels.
    away = ("ASCENDSIM_HBM", "ASCENDSIM_POISON", "ASCENDSIM_TRACE")
    kept = {name: value for name, value in os.environ.items() if name not in away}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        program, cwd=ROOT, env=kept, stdout=subprocess.PIPE, timeout=500, check=True
    )
    found: dict[str, Steps] = json.loads(done.stdout)
    return found


def test_at_least_nine_tenths_of_communication_are_hidden(taken: dict[str, Steps]) -> None:
    for step in taken["overlap"]:
        assert step["backward"] > step["collectives"]
        assert step["hidden"] >= 0.9


def test_what_shows_is_the_last_bucket(taken: dict[str, Steps]) -> None:
    for step in taken["overlap"]:
        # Beside it, what comes with it: the tally, launches, and the last copy into the bucket.
        assert step["exposed"] <= 1.35 * step["collectives"] / BUCKETS
    # Which is what torch's leaves, too.
    assert taken["overlap"][-1]["exposed"] <= 1.001 * taken["torch"][-1]["exposed"]


def test_a_step_is_shorter_by_what_is_hidden(taken: dict[str, Steps]) -> None:
    for with_it, without in zip(taken["overlap"], taken["no overlap"], strict=True):
        assert with_it["backward"] == without["backward"]
        saved = without["makespan"] - with_it["makespan"]
        assert saved == pytest.approx(without["exposed"] - with_it["exposed"], rel=0.01)
        assert without["hidden"] < 0.1


def test_a_gradient_is_divided_while_it_is_copied(taken: dict[str, Steps]) -> None:
    # As torch does, from the second step on: the first learns in how many parts gradients come.
    assert taken["overlap"][-1]["backward"] == taken["torch"][-1]["backward"]
    assert taken["overlap"][-1]["makespan"] <= 1.01 * taken["torch"][-1]["makespan"]


def test_no_less_is_hidden_than_torch_hides(taken: dict[str, Steps]) -> None:
    assert taken["overlap"][-1]["hidden"] >= taken["torch"][-1]["hidden"]
    # From the first step on, in which torch has one bucket.
    assert taken["overlap"][0]["hidden"] > taken["torch"][0]["hidden"]
