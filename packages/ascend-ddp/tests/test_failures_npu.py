"""A rank that dies, or never comes, over HCCL: what the other is told, and when.

Hosts that have gloo beside it hear of it in the backward that lacks the rank. Otherwise the host
does not wait, the optimizer's step goes by, and it is the next backward that fails.
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

sys.path.insert(0, str(Path(__file__).parent))
import npu_failures

HERE = Path(__file__).resolve().parent
LAUNCHER = HERE.parents[2] / "packages/ascend-sim/tests/launch_ranks.py"

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None or running.config.schedule != "lazy",
    reason="the device runs behind the host under --npu-sim=lazy",
)


def told(folder: Path, program: str, backend: str) -> dict[str, Any]:
    """What rank 0 was told. Its process fails in the end: its device has stopped."""
    variables = {
        "ASCENDSIM_DEVICES": "2",
        "ASCENDSIM_COLLECTIVE_TIMEOUT_S": str(npu_failures.TIMEOUT_S),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    subprocess.run(
        [sys.executable, LAUNCHER, "npu_failures", program, "2", backend, folder],
        env={**os.environ, **variables},
        capture_output=True,
        timeout=500,
        check=False,
    )
    found: dict[str, Any] = json.loads((folder / "0.json").read_text())[program]
    return found


def check(found: dict[str, Any]) -> None:
    """It names this rank, what it waited for, and what that holds; no gradient is left."""
    assert found["type"] == "CommunicationError", found
    waited = f"buckets 0 to {found['buckets'] - 1} and the tally of gradients."
    assert f"rank 0 of 2 waited in vain for {waited}" in found["text"]
    assert "it holds the gradients of 3." in found["text"]
    assert found["gradients"] == 0
    assert found["took"] < npu_failures.AWAY_S
    assert found["place"] == "backward"


@pytest.mark.parametrize("program", ["dies_in_backward", "never_comes"])
def test_hosts_that_can_talk_are_told_at_once(program: str, tmp_path: Path) -> None:
    found = told(tmp_path, program, "cpu:gloo,npu:hccl")
    check(found)
    assert found["steps"] == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("dies_between_steps", "has ended"),
        ("never_comes", f"did not call it within {npu_failures.TIMEOUT_S:g} s"),
    ],
)
def test_others_are_told_in_their_next_backward(program: str, reason: str, tmp_path: Path) -> None:
    found = told(tmp_path, program, "hccl")
    check(found)
    assert found["steps"] == 1
    assert "HCCL_E_" in found["text"] and "rank 1 of 2" in found["text"]
    assert reason in found["text"]
