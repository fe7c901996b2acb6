"""Gradients over HCCL, on two processes with a simulated NPU each.

What is taken away is the order that a step relies on: each wait, and then something is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ascend_sim

sys.path.insert(0, str(Path(__file__).parent))
import cases
import cases_joined  # noqa: F401  registers more
import cases_of_buffers  # noqa: F401  registers more
import cases_of_misuse  # noqa: F401  registers more
import cases_of_segments  # noqa: F401  registers more
import cases_of_use  # noqa: F401  registers more

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LAUNCHER = ROOT / "packages/ascend-sim/tests/launch_ranks.py"

running = ascend_sim.current()
pytestmark = pytest.mark.skipif(
    running is None or running.config.schedule != "lazy",
    reason="races show under --npu-sim=lazy",
)

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What two ranks have found in one run."""
    folder = tmp_path_factory.mktemp("ranks")
    names = "all_cases,waits,told,synchronisations,sharded,on_two_devices"
    variables = {
        "ASCENDSIM_DEVICES": "4",
        "ASCENDSIM_TRACE": "1",
        "ASCENDSIM_POISON": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, LAUNCHER, "npu_ranks", names, "2", "cpu:gloo,npu:hccl", folder],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, ranks: Ranks) -> None:
    failed = [rank["all_cases"].get(name) for rank in ranks]
    assert failed == [None, None], "\n".join(filter(None, failed))


def test_streams_that_fill_a_bucket_are_waited_for(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["waits"]["the same order"] and rank["waits"]["a changing order"]


@pytest.mark.parametrize(
    "wait",
    [
        "a bucket waits for the streams that fill it",
        "for all of them",
        "streams wait for a new plan",
        "gradients wait for their bucket",
    ],
)
def test_without_a_wait_gradients_are_wrong(wait: str, ranks: Ranks) -> None:
    found: list[Mapping[str, bool]] = [rank["waits"] for rank in ranks]
    assert not any(rank[wait] for rank in found)


def test_the_tally_waits_for_the_collective_and_the_host_for_the_tally(ranks: Ranks) -> None:
    both, no_host, no_stream = zip(*(rank["told"] for rank in ranks), strict=True)
    assert all(both)
    assert not any(no_host)
    assert not all(no_stream)  # one rank may know by itself what all of them do


def test_a_step_waits_for_no_device_where_hosts_talk(ranks: Ranks) -> None:
    assert [rank["synchronisations"][0] for rank in ranks] == [[0, 0], [0, 0]]


def test_a_step_waits_for_the_device_once_where_they_do_not(ranks: Ranks) -> None:
    # For the tally of the step before.
    assert [rank["synchronisations"][1] for rank in ranks] == [[1, 1], [1, 1]]


def test_a_sharded_optimizer_equals_the_whole_one(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["sharded"]["overlap True"] and rank["sharded"]["overlap False"]


def test_without_the_wait_for_weights_they_are_stale(ranks: Ranks) -> None:
    assert not any(rank["sharded"]["without the wait"] for rank in ranks)


def test_a_model_may_be_on_two_devices(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["on_two_devices"] == [True] * 6
