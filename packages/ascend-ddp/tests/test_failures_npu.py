"""A rank that dies, or never comes, over HCCL: the other is told in its next backward.

The host does not wait for an accelerator, so that the step of the backward that failed goes by.
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

HERE = Path(__file__).resolve().parent
LAUNCHER = HERE.parents[2] / "packages/ascend-sim/tests/launch_ranks.py"
TIMEOUT_S = 2.0

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None or running.config.schedule != "lazy",
    reason="the device runs behind the host under --npu-sim=lazy",
)


def told(folder: Path, program: str) -> dict[str, Any]:
    """What rank 0 was told. Its process fails in the end: its device has stopped."""
    variables = {
        "ASCENDSIM_DEVICES": "2",
        "ASCENDSIM_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    subprocess.run(
        [sys.executable, LAUNCHER, "npu_failures", program, "2", "cpu:gloo,npu:hccl", folder],
        env={**os.environ, **variables},
        capture_output=True,
        timeout=150,
        check=False,
    )
    found: dict[str, Any] = json.loads((folder / "0.json").read_text())[program]
    return found


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("dies_between_steps", "has ended"),
        ("dies_in_backward", "has ended"),
        ("never_comes", f"did not call it within {TIMEOUT_S:g} s"),
    ],
)
def test_the_other_rank_is_told_in_its_next_backward(
    program: str, reason: str, tmp_path: Path
) -> None:
    found = told(tmp_path, program)
    assert found["type"] == "CommunicationError", found
    text = found["text"]
    last = found["buckets"] - 1
    assert f"rank 0 of 2 waited in vain for what a backward has sent: buckets 0 to {last}" in text
    assert "it holds the gradients of 3." in text
    assert "HCCL_E_" in text and "rank 1 of 2" in text and reason in text
    assert (found["place"], found["steps"]) == ("backward", 1)
    assert found["gradients"] == 0
    assert found["took"] < TIMEOUT_S + 3
