"""The demo and the doctor on the real torch_npu over a simulated NPU, too small for the plain run.

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


SIMULATOR = "import sys; from ascend_sim.cli import main; sys.exit(main())"


def test_doctor_sees_the_simulated_npus_and_what_can_be_locked() -> None:
    device = ["run", "--schedule=eager", "--devices=2", f"--hbm={HBM}"]
    done = subprocess.run(
        [sys.executable, "-c", SIMULATOR, *device, "-m", "ascend_suite", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["findings"]
    machine = found["machine"]
    npu, cuda = machine["accelerators"]
    assert npu["unavailable"] is None and cuda["devices"] == []
    assert [device["total_bytes"] for device in npu["devices"]] == [168 << 20] * 2
    assert npu["capabilities"]["fused_swiglu"] is True
    assert machine["torch_npu"]["version"] and machine["torch_npu"]["failure"] is None
    assert machine["memory"]["pin_failure"] is None
    assert machine["memory"]["pinned_bytes"] >= 32 << 20
    rules = {finding["rule"] for finding in found["findings"]}
    assert not {"machine/no-device", "machine/torch-npu", "machine/operators"} & rules


def test_on_a_small_npu_plain_is_out_of_memory_and_recompute_trains(tmp_path: Path) -> None:
    figures = tmp_path / "demo.json"
    device = ["run", "--schedule=eager", f"--hbm={HBM}"]
    demo = [
        "demo",
        "--device=npu",
        "--steps=4",
        f"--out={tmp_path}",
        f"--json={figures}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SIMULATOR, *device, "-m", "ascend_suite", *demo],
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
