"""A session on the real torch_npu over a simulated NPU that is too small for it.

Runs with `--npu-sim`, of whatever schedule: each program starts a device of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from ascend_core.device import available_backends
from ascend_suite._facts import found_facts

pytestmark = pytest.mark.skipif(
    "npu" not in available_backends() or "ASCENDSIM_SCHEDULE" not in os.environ,
    reason="needs pytest --npu-sim",
)

PROGRAM = Path(__file__).parent / "small_npu_session.py"


def said(model: str, hbm: str, *number: str) -> list[str]:
    """What a program says whose device has so much memory."""
    simulator = "import sys; from ascend_sim.cli import main; sys.exit(main())"
    device = ["run", "--schedule=eager", f"--hbm={hbm}", str(PROGRAM), model, *number]
    done = subprocess.run(
        [sys.executable, "-c", simulator, *device], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_out_of_memory_names_a_plan_that_fits() -> None:
    first, *notes = said("gpt", "96M")
    assert first == "out of memory"
    [note] = [note for note in notes if note.startswith("ascend-suite: ")]
    assert "in 96 MiB would fit: " in note
    named = re.search(r"would fit: recompute-layers\(num_layers=(\d+)\)\.", note)
    assert named is not None, note
    assert said("gpt", "96M", named[1]) == ["backward"] * 3 + ["trained"]
    fewer = str(int(named[1]) - 1)
    first, *notes = said("gpt", "96M", fewer)
    assert first == "out of memory"
    assert any(named[0] in note for note in notes)


def test_out_of_memory_in_an_optimizer_names_a_plan_that_fits() -> None:
    first, second, *notes = said("wide", "256M")
    assert (first, second) == ("backward", "out of memory")
    named = re.search(
        r"would fit: swap-optimizer\(swap_optimizer_times=(\d+)\)\.", "\n".join(notes)
    )
    assert named is not None, notes
    assert said("wide", "256M", named[1]) == ["backward"] * 3 + ["trained"]


def test_a_model_that_does_not_tell_its_shape_is_told_what_to_do() -> None:
    first, *notes = said("unknown", "96M")
    assert first == "out of memory"
    assert any("does not tell its layers" in note and "shape=ModelShape" in note for note in notes)


def test_the_operators_of_torch_npu_are_known() -> None:
    found = found_facts([nn.Linear(2, 2).to("npu")], None)
    assert found["device"] == "npu"
    operators = found["npu_operators"]
    assert isinstance(operators, tuple)
    assert {"npu_swiglu", "npu_rms_norm", "npu_fusion_attention_v2"} <= set(operators)
    assert "linear" not in operators


def test_the_version_of_cann_is_said_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2).to("npu")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert "cann_version" not in found_facts([model], None)
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux/ascend_toolkit_install.info").write_text("version=8.5.0\n")
    assert found_facts([model], None)["cann_version"] == "8.5.0"
