"""What runs where.

The tests of these files need no device and run everywhere. All others run on a simulated NPU, that
is with `--npu-sim=SCHEDULE`, in an environment with torch_npu (`python3 -m nox -s npu`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ascend_sim

WITHOUT_DEVICE = {
    "test_build.py",
    "test_cli.py",
    "test_config.py",
    "test_machine.py",
    "test_package.py",
    "test_profile.py",
    "test_runtime_mirror.py",
    "test_timeline.py",
}
ROOT = Path(__file__).resolve().parents[3]
# Of a program that compiles nothing: one that takes longer hangs.
LONGEST_SECONDS = 300

Run = Callable[..., str]
Ranks = list[dict[str, Any]]

LAUNCHER = Path(__file__).with_name("launch_ranks.py")
BOTH = "cpu:gloo,npu:hccl"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "schedules(*names): run under these schedules alone")


def pytest_report_header() -> str | None:
    if ascend_sim.current():
        return None
    return "ascend-sim: only the tests that need no device are collected; the others need --npu-sim"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    if is_test and collection_path.name not in WITHOUT_DEVICE and not ascend_sim.current():
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    running = ascend_sim.current()
    here = [item for item in items if runs_here(item, running)]
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = here


def runs_here(item: pytest.Item, running: ascend_sim.Simulator | None) -> bool:
    marker = item.get_closest_marker("schedules")
    return marker is None or (running is not None and running.config.schedule in marker.args)


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """A function that runs a program in a Python of its own and returns what it printed.

    Keyword arguments are variables of its environment. `fails=True`: it must fail, and what it
    wrote to stderr is returned. A program that hangs fails the test.
    """

    def run(program: str, *, fails: bool = False, **variables: str) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASCENDSIM_H")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**inherited, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_SECONDS,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture(scope="session")
def launch() -> Callable[..., Ranks]:
    """A function that runs functions of `rank_programs` on several ranks."""

    def run(
        folder: Path, names: str, world_size: int, *, backend: str = BOTH, **variables: str
    ) -> Ranks:
        """Run functions of `rank_programs` and return their results, by rank.

        Keyword arguments are variables of the ranks' environment.
        """
        running = ascend_sim.current()
        assert running is not None
        own = {"ASCENDSIM_DEVICES": str(world_size), "ASCENDSIM_SCHEDULE": running.config.schedule}
        done = subprocess.run(
            [sys.executable, LAUNCHER, "rank_programs", names, str(world_size), backend, folder],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own, **variables},
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert not errors, "\n".join(errors)
        results = [folder / f"{rank}.json" for rank in range(world_size)]
        assert all(path.exists() for path in results), done.stderr
        return [json.loads(path.read_text()) for path in results]

    return run
