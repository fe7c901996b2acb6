"""The demo on the real torch_npu over a simulated NPU that is too small for the plain run.

Runs with `--npu-sim`, of whatever schedule: the command starts a device of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_core.device import available_backends

pytestmark = pytest.mark.skipif(
    "npu" not in available_backends() or "ASCENDSIM_SCHEDULE" not in os.environ,
    reason="needs pytest --npu-sim",
)

# Of the default model: each kind of recompute is content with 160 MiB, plain needs 180. Most of it
# is activations, so that moving the optimizer's state is no help.
HBM = "168M"


def test_on_a_small_npu_plain_is_out_of_memory_and_recompute_trains(tmp_path: Path) -> None:
    figures = tmp_path / "demo.json"
    simulator = "import sys; from ascend_sim.cli import main; sys.exit(main())"
    device = ["run", "--schedule=eager", f"--hbm={HBM}"]
    demo = [
        "demo",
        "--device=npu",
        "--steps=4",
        f"--out={tmp_path}",
        f"--json={figures}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", simulator, *device, "-m", "ascend_suite", *demo],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no plain run" in done.stdout
    assert "plain, out of memory: NPU out of memory. Tried to allocate" in done.stdout
    plain, fused, *recomputes, reuse, attention, swap = json.loads(figures.read_text())["runs"]
    assert (plain["feature"], plain["status"]) == ("plain", "out of memory")
    assert plain["peak_bytes"] is None and plain["bitwise_equal"] is None
    assert (reuse["feature"], reuse["status"]) == ("reuse-fp32-param", "not available")
    assert (swap["feature"], swap["status"]) == ("swap-optimizer", "out of memory")
    names = ["recompute-activation", "recompute-layers", "recompute-norm"]
    assert [run["feature"] for run in recomputes] == names
    assert (fused["feature"], attention["feature"]) == ("fused-ops", "swap-attention")
    for run in (fused, *recomputes, attention):
        assert run["status"] == "finished"
        assert run["bitwise_equal"] is run["saved_bytes"] is None
        assert 0 < run["peak_bytes"] < 168 * 2**20
    assert len({run["final_loss"] for run in (*recomputes, attention)}) == 1
    assert (tmp_path / "demo.png").stat().st_size > 0
