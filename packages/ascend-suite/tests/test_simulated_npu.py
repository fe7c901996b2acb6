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
    runs = {run["feature"]: run for run in json.loads(figures.read_text())["runs"]}
    plain = runs["plain"]
    assert plain["status"] == "out of memory"
    assert plain["peak_bytes"] is None and plain["bitwise_equal"] is None
    assert runs["swap-optimizer"]["status"] == "out of memory"
    recomputes = ["recompute-activation", "recompute-layers", "recompute-norm"]
    for name in ("fused-ops", *recomputes, "swap-attention", "best combination"):
        run = runs[name]
        assert run["status"] == "finished"
        assert run["bitwise_equal"] is run["saved_bytes"] is None
        assert 0 < run["peak_bytes"] < 168 * 2**20
    losses = {runs[name]["final_loss"] for name in (*recomputes, "swap-attention")}
    assert len(losses) == 1
    best = runs["best combination"]
    assert best["peak_bytes"] < min(runs[name]["peak_bytes"] for name in recomputes)
    assert "recompute-layers" in best["features"] and len(best["features"]) > 1
    # Half the bytes of activations: BF16 finds room, and is compared with BF16.
    assert runs["reuse-fp32-param"]["against"] == "plain bf16"
    assert runs["reuse-fp32-param"]["bitwise_equal"] is True
    assert runs["reuse-fp32-param"]["saved_bytes"] > 0
    assert (tmp_path / "demo.png").stat().st_size > 0
