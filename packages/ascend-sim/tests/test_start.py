"""Starting, refusing, the command and the plug-in, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ascend_sim

pytestmark = pytest.mark.schedules("eager")  # the processes choose their own

Run = Callable[..., str]


def test_start_twice_is_the_same_simulation_unless_options_differ(python: Run) -> None:
    shown = python(
        """
import ascend_sim
first = ascend_sim.start(hbm="64M")
assert ascend_sim.start(hbm="64M") is first and ascend_sim.current() is first
assert ascend_sim.start(hbm=64 * 2**20) is first
try:
    ascend_sim.start(hbm="128M")
except ascend_sim.RefusedError as error:
    print(error)
"""
    )
    assert "other options" in shown
    assert "instead  one process per configuration" in shown


def test_it_starts_after_torch_and_not_after_torch_npu(python: Run) -> None:
    late = "import ascend_sim, torch{}\nascend_sim.start(); print(torch.ones(2).npu().sum().item())"
    assert python(late.format("")).split()[-1] == "2.0"
    shown = python(
        """
import ascend_sim
ascend_sim.start()
ascend_sim._start._running.clear()
ascend_sim.start()
""",
        fails=True,
    )
    assert "torch_npu was imported already" in shown


def test_a_real_cann_is_refused(python: Run) -> None:
    shown = python(
        "import ascend_sim; ascend_sim.start()", fails=True, ASCEND_HOME_PATH="/opt/cann"
    )
    assert "cannot start beside a real CANN" in shown


def test_the_trap_that_start_avoids_is_there(python: Run) -> None:
    # Documented: without a simulation, torch loads torch_npu by itself, which finds no runtime.
    shown = python("import torch", fails=True, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert "torch_npu" in shown
    python("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_after_a_failed_import_of_torch_it_does_not_start(python: Run) -> None:
    shown = python(
        """
try:
    import torch
except RuntimeError:
    pass
import ascend_sim
ascend_sim.start()
""",
        fails=True,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )
    assert "an import of torch has failed in this process" in shown


def test_the_environment_is_the_second_way(python: Run) -> None:
    program = "import ascend_sim; print(ascend_sim.start(devices=3).config)"
    shown = python(program, ASCENDSIM_SCHEDULE="lazy", ASCENDSIM_POISON="1")
    assert "schedule='lazy'" in shown
    assert "poison=True" in shown
    assert "devices=3" in shown


def test_nothing_is_initialised_before_its_first_use(python: Run) -> None:
    shown = python(
        "import ascend_sim; ascend_sim.start()\n"
        "import torch; print(torch.npu.is_initialized(), torch.npu.is_available())"
    )
    assert shown.split() == ["False", "True"]


def test_pending_tasks_at_the_end_of_a_program_do_no_harm(python: Run) -> None:
    for schedule in ascend_sim.SCHEDULES:
        python(
            "import ascend_sim; ascend_sim.start()\n"
            "import torch\nx = torch.zeros(1000, device='npu')\nfor _ in range(50): x.add_(1)",
            ASCENDSIM_SCHEDULE=schedule,
        )


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [
        sys.executable,
        "-c",
        "import sys; from ascend_sim.cli import main; sys.exit(main())",
    ]
    return subprocess.run([*program, *words], cwd=cwd, capture_output=True, text=True, check=False)


def test_run_runs_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("SCALE = 2\n")
    (tmp_path / "script.py").write_text(
        "import sys, torch, ascend_sim\nfrom beside import SCALE\n"
        "if __name__ == '__main__':\n"
        "    x = torch.ones(int(sys.argv[1]), device='npu') * SCALE\n"
        "    print(x.sum().item(), sys.argv[1:], ascend_sim.current().config.schedule)\n"
    )
    words = ["--schedule", "lazy", "--poison", "script.py", "3", "--hbm"]
    done = command("run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("6.0 ['3', '--hbm'] lazy")
    module = command("run", "--hbm", "64M", "-m", "script", "4", cwd=tmp_path)
    assert module.stdout.strip().endswith("8.0 ['4'] eager"), module.stderr


def test_what_follows_a_module_is_the_modules(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = command("run", "--hbm", "64M", "-m", "program", "-q", "--hbm", "3", cwd=tmp_path)
    assert done.stdout.strip().endswith("['-q', '--hbm', '3']"), done.stderr


def test_an_exit_status_of_the_script_is_that_of_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)\n")
    assert command("run", "script.py", cwd=tmp_path).returncode == 7


def test_doctor_says_that_all_is_well(tmp_path: Path) -> None:
    done = command("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first sum  right" in done.stdout


PLUGIN_TEST = """
import pytest, torch
from ascend_sim import Fault

def test_device(npu_sim, npu_counters):
    torch.ones(3, device="npu").add_(1)
    assert npu_counters().kernels >= 1
    assert npu_sim.config.schedule == "lazy"

def test_forgotten_failure(npu_sim):
    x = torch.ones(3, device="npu")
    torch.npu.synchronize()
    with npu_sim.fail(Fault.KERNEL):
        x.add_(1)
"""


def plugin(*words: str, cwd: Path) -> str:
    (cwd / "test_it.py").write_text(PLUGIN_TEST)
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *words]
    done = subprocess.run(program, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_plug_in_runs_tests_on_the_device(tmp_path: Path) -> None:
    shown = plugin("--npu-sim=lazy", "test_it.py", cwd=tmp_path)
    assert "2 passed, 1 error" in shown
    assert "A kernel failed and nothing synchronised with it" in shown


def test_without_the_option_torch_imports_and_the_fixture_says_what_is_missing(
    tmp_path: Path,
) -> None:
    shown = plugin("test_it.py", cwd=tmp_path)
    assert "run pytest with --npu-sim" in shown


def test_a_path_after_the_bare_option_is_no_schedule(tmp_path: Path) -> None:
    assert "write --npu-sim=SCHEDULE" in plugin("--npu-sim", "test_it.py", cwd=tmp_path)
