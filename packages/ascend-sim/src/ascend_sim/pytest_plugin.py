"""The pytest plug-in: `pytest --npu-sim=lazy` runs tests on a simulated NPU.

The schedule is the option's value, `eager` where it has none; the other options of the device are
the environment's (`ASCENDSIM_HBM=64M`). The simulation starts before any conftest is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator, Iterator

import pytest

from ascend_sim import _machine
from ascend_sim._simulator import Simulator
from ascend_sim._start import current, start
from ascend_sim.config import SCHEDULES
from ascend_sim.counters import Counters
from ascend_sim.errors import SimError


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--npu-sim`."""
    parser.getgroup("ascend-sim").addoption(
        "--npu-sim",
        nargs="?",
        const="eager",
        type=_schedule,
        metavar="SCHEDULE",
        help=f"run on a simulated NPU; the schedule is one of {', '.join(SCHEDULES)}",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start the simulation, or at least let `import torch` work where torch_npu is in its way."""
    schedule = early_config.known_args_namespace.npu_sim
    if schedule is not None:
        os.environ["ASCENDSIM_SCHEDULE"] = schedule  # for processes that tests start
        try:
            start()
        except SimError as error:
            raise pytest.UsageError(str(error)) from error
    elif _machine.installed("torch-npu") and not _machine.real_cann(os.environ):
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def pytest_report_header() -> str | None:
    """Say at the top what device is simulated."""
    running = current()
    return f"ascend-sim: {running.config}" if running else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test meet the same choices of the schedule "random", whatever ran before it."""
    if running := current():
        running.reseed()
        if running.config.trace:
            running.races()  # those of the test before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say below a failed test which races were found in it, where they are traced."""
    report = yield
    running = current()
    if running and running.config.trace and call.when == "call" and report.failed:
        text = "\n".join(str(race) for race in running.races())
        report.sections.append(("races on the simulated NPU", text or "none"))
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Run what a test left pending, so that it does not fall into the next one.

    Raises:
        RuntimeError: When a kernel failed and nothing in the test could learn of it.
    """
    if running := current():
        running.drain()
        if text := running.take_error():
            raise RuntimeError(f"A kernel failed and nothing synchronised with it: {text}")


@pytest.fixture
def npu_sim() -> Simulator:
    """The handle of the simulation; the test fails where there is none."""
    running = current()
    if running is None:
        pytest.fail("This test needs a simulated NPU: run pytest with --npu-sim.", pytrace=False)
    return running


@pytest.fixture
def npu_counters(npu_sim: Simulator) -> Iterator[Callable[[], Counters]]:
    """A function that returns what the runtime has done since the test began."""
    before = npu_sim.counters()
    yield lambda: npu_sim.counters() - before


def _schedule(text: str) -> str:
    if text not in SCHEDULES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no schedule ({', '.join(SCHEDULES)}): write --npu-sim=SCHEDULE, "
            "and a bare --npu-sim after all paths"
        )
    return text
