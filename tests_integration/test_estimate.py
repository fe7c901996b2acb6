"""Estimated against measured peaks: the demo's model, for shapes drawn from a published seed.

On the CPU here; on a simulated NPU with `--npu-sim=eager`, where memory is exact, and
`PYTORCH_NPU_ALLOC_CONF=expandable_segments:True`, without which the allocator hands out blocks that
are up to 1 MiB larger than what was asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ascend_sim
from ascend_suite import Estimate, ModelShape, estimate, suggest
from ascend_suite.estimation.hardware import DeviceKind
from benchmarks.estimate_cases import draw_shapes, measured_peak, plans_for
from benchmarks.estimates import SEED, named

ROOT = Path(__file__).resolve().parents[1]
SHAPES = list(draw_shapes(SEED, 20))
WITHIN = 0.05
FEW = 4

running = ascend_sim.current()
on_npu = pytest.mark.skipif(
    running is None
    or running.config.schedule != "eager"
    or "expandable_segments:True" not in os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""),
    reason="needs pytest --npu-sim=eager and PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
)
on_cpu = pytest.mark.skipif(running is not None, reason="runs without a simulated NPU")


def assert_near(shape: ModelShape, device: DeviceKind) -> None:
    plans = plans_for(shape, device)
    assert len(plans) >= 6
    off = {}
    for name, plan in plans.items():
        measured = measured_peak(shape, plan, device)
        off[name] = estimate(shape, plan, device=device).peak_bytes / measured - 1
    worst = max(off, key=lambda name: abs(off[name]))
    assert abs(off[worst]) < WITHIN, f"{worst}: {100 * off[worst]:+.2f} % of {named(shape)}"


@on_cpu
@pytest.mark.parametrize("number", range(20))
def test_on_the_cpu(number: int) -> None:
    assert_near(SHAPES[number], "cpu")


@on_npu
@pytest.mark.parametrize("number", range(FEW))
def test_on_a_simulated_npu(number: int) -> None:
    assert_near(SHAPES[number], "npu")


@on_npu
@pytest.mark.nightly
@pytest.mark.parametrize("number", range(FEW, 20))
def test_more_on_a_simulated_npu(number: int) -> None:
    assert_near(SHAPES[number], "npu")


def test_plans_differ() -> None:
    """The plans are no six names for the same thing."""
    shape = SHAPES[0]
    for device in ("cpu", "npu"):
        points = {
            tuple(moment.total for moment in estimate(shape, plan, device=device).moments)  # type: ignore[arg-type]
            for plan in plans_for(shape, device).values()
        }
        assert len(points) == len(plans_for(shape, device))


# Of a training whose plain form needs about 160 MiB.
TRIED = ModelShape(
    layers=6, hidden=128, heads=4, seq=256, vocab=256, micro_batch=8, activation="gelu",
    tied=False,
)  # fmt: skip
CHILD = """
import sys
import torch
from benchmarks.estimate_cases import measured_peak
from tests_integration.test_estimate import TRIED, suggested
from ascend_suite.plan import Plan
plan = Plan() if sys.argv[1] == "plain" else suggested().plan
try:
    print("trained in", measured_peak(TRIED, plan, "npu"))
except torch.OutOfMemoryError:
    print("out of memory")
"""
ROOM = 24
"""MiB beside an estimate: a segment of large tensors grows by 20, one of small tensors by 2."""


def suggested() -> Estimate:
    """The plan for a device of two thirds of what plain needs."""
    found = suggest(TRIED, hbm=int(estimate(TRIED).peak_bytes * 2 / 3))
    assert found.chosen is not None and found.chosen.estimate.plan.features
    return found.chosen.estimate


@pytest.mark.skipif(
    "ASCENDSIM_SCHEDULE" not in os.environ, reason="needs pytest --npu-sim, of whatever schedule"
)
def test_a_suggested_plan_trains_where_plain_does_not(tmp_path: Path) -> None:
    hbm = (suggested().peak_bytes >> 20) + ROOM
    assert hbm << 20 < 0.8 * estimate(TRIED).peak_bytes
    child = tmp_path / "child.py"
    child.write_text(CHILD, encoding="utf-8")
    assert on_a_device(hbm, child, "plain") == "out of memory"
    assert on_a_device(hbm, child, "planned").startswith("trained in ")


def on_a_device(hbm: int, child: Path, word: str) -> str:
    """What a program says at its end that runs on a device of so many MiB."""
    simulator = "import sys; from ascend_sim.cli import main; sys.exit(main())"
    device = ["run", "--schedule=eager", f"--hbm={hbm}M", str(child), word]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", simulator, *device],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
