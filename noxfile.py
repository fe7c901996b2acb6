"""The sessions of the repository; `python3 -m nox --list` shows them.

What follows `--` reaches the session's tool.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"  # the first with tags on nox.param
nox.options.sessions = ["tests"]

PACKAGES = sorted(path.parent.name for path in Path("packages").glob("*/pyproject.toml"))
TORCHES = ["2.13"]
SWAP, REUSE, OPS = (f"packages/ascend-{name}" for name in ("swap", "reuse-param", "ops"))
DDP = "packages/ascend-ddp/tests"
TRACED = f"{SWAP}/tests/test_attention_npu.py"  # where races are looked for among the bytes
ESTIMATE = "tests_integration/test_estimate.py"
# So that a block is as large as what was asked for, whatever was freed before.
WHOLE = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
# Small, so that it can be filled. What is read too early, poison keeps from being right by chance.
SMALL_NPU = {"ASCENDSIM_HBM": "384M", "ASCENDSIM_POISON": "1"}

# The tests' tensors are small: more threads than this only wait for one another. And bytecode is
# written even where the user's shell forbids it, since torch is installed without.
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": ""}
# Where nothing is timed, threads that wait sleep, and leave the processors to other processes.
TESTING = {**ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE"}


def run_shared(
    session: nox.Session, program: str, *arguments: str, env: Mapping[str, str] = ENVIRONMENT
) -> None:
    """Run a program of the environment that the sessions share; make it where it is not there."""
    session.run(sys.executable, "tools/environment.py", external=True)
    session.run(f".nox/shared/bin/{program}", *arguments, env=env, external=True)


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the environment that the sessions share, a module on each processor."""
    spread = ["-n", "auto", "--maxprocesses=4", "--dist=loadscope"]
    options = [*spread, *arguments, *session.posargs]
    run_shared(session, "python", "-m", "pytest", *options, env=TESTING)


def run_suite_on_npu(session: nox.Session, hbm: str | None, *arguments: str) -> None:
    """Run `ascend-suite` on the NPU where there is a CANN, and on a simulated one elsewhere."""
    cann = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if cann and hbm is not None:
        session.error(f"--hbm is for a simulated NPU, and {cann} has a CANN: leave it out")
    session.run(sys.executable, "tools/environment.py", "npu", external=True)
    program = ["ascend-suite"]
    if not cann:
        session.log("The NPU is simulated: its times and its rounding are no real one's.")
        memory = [] if hbm is None else [f"--hbm={hbm}"]
        program = ["ascend-sim", "run", *memory, "-m", "ascend_suite"]
    variables = {**ENVIRONMENT, "ASCENDSIM_CACHE": str(Path(".nox/ascend-sim").resolve())}
    command = [f".nox/npu/bin/{program[0]}", *program[1:], *arguments]
    session.run(*command, env=variables, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small language model plain and once per feature; compare memory, time and bits.

    `-- --device npu` runs on a simulated NPU where there is no real one, `--hbm SIZE` says of how
    much memory.
    """
    parser = argparse.ArgumentParser("nox -s demo --", add_help=False, allow_abbrev=False)
    parser.add_argument("--hbm")
    parser.add_argument("--device", default="")
    own, others = parser.parse_known_args(session.posargs)
    arguments = ["demo", *others, *([f"--device={own.device}"] if own.device else [])]
    if own.device.partition(":")[0] == "npu":
        run_suite_on_npu(session, own.hbm, *arguments)
    elif own.hbm is not None:
        session.error("--hbm is the memory of a simulated NPU: write --device npu beside it")
    else:
        run_shared(session, "ascend-suite", *arguments)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of every package (arguments go to pytest: `-- -k saved --cov`)."""
    run_tests(session)


@nox.session(name="tests-isolated", venv_backend="none")
@nox.parametrize("torch", [nox.param(v, id=f"torch-{v}", tags=[f"torch-{v}"]) for v in TORCHES])
@nox.parametrize("package", [nox.param(name, id=name, tags=[name]) for name in PACKAGES])
def tests_isolated(session: nox.Session, package: str, torch: str) -> None:
    """Build a package's wheel and smoke-test it beside nothing but what it declares."""
    session.run(sys.executable, "tools/environment.py", torch, external=True)
    python = f".nox/torch-{torch}/bin/python"
    session.run(python, "tools/isolated.py", package, env=ENVIRONMENT, external=True)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Run the tests that need several packages, or the documentation (arguments go to pytest)."""
    run_tests(session, "tests_integration")


@nox.session(venv_backend="none")
def exhaustive(session: nox.Session) -> None:
    """Split and join all 2 ** 32 patterns of FP32 (`-- native`: one codec alone)."""
    script = "packages/ascend-reuse-param/tests/exhaustive.py"
    run_shared(session, "python", script, *session.posargs)


@nox.session(venv_backend="none")
def npu(session: nox.Session) -> None:
    """Run the tests on the real torch_npu over a simulated NPU, in every schedule."""
    session.run(sys.executable, "tools/environment.py", "npu", external=True)
    packages = [f"packages/ascend-{name}" for name in ("sim", "core", "recompute")]
    packages += [
        f"packages/ascend-suite/tests/test_{name}.py" for name in ("simulated_npu", "session_npu")
    ]
    libraries = str(Path(".nox/ascend-sim").resolve())
    strict = {**TESTING, "ASCENDSIM_STRICT": "1", "ASCENDSIM_CACHE": libraries}
    session.run(".nox/npu/bin/ascend-sim", "build", env=strict, external=True)

    def run(arguments: list[str]) -> object:
        pytest = [".nox/npu/bin/python", "-m", "pytest", *arguments, *session.posargs]
        variables = {
            **strict,
            **(SMALL_NPU if any(one.startswith((SWAP, REUSE)) for one in arguments) else {}),
            **({"ASCENDSIM_TRACE": "1"} if TRACED in arguments else {}),
            **(WHOLE if ESTIMATE in arguments else {}),
        }
        return session.run(*pytest, env=variables, external=True, silent=True)

    # The equality of optimizers on the CPU needs no second run here.
    skipped = "--ignore=packages/ascend-core/tests/test_optim_equality.py"
    runs = [["--npu-sim=lazy", *packages, "docs/examples", skipped]]
    # What does not run on the device runs once.
    for schedule in ("early", "eager", "thread"):
        runs.append([f"--npu-sim={schedule}", *packages, "-k", "npu:0 or ascend-sim"])
    operators = sorted(str(path) for path in Path(OPS, "tests").glob("test_npu_*.py"))
    runs.append(["--npu-sim=lazy", *operators])
    runs.append(["tests_integration/test_megatron_npu.py"])  # it starts simulated NPUs itself
    runs.append(["--npu-sim=lazy", "tests_integration/test_pairs.py", "-k", "npu"])
    runs.append(["--npu-sim=eager", ESTIMATE])
    # Features are tested where they find races, or memory is exact: the rest is ascend-sim's.
    for schedule in ("random", "timed"):
        runs.append([f"--npu-sim={schedule}", packages[0]])

    # Each where it can show something; see the tests.
    tests = {
        "early": "optimizer waits_npu attention_waits_npu",
        "eager": "optimizer failures_npu memory_npu attention_failures_npu attention_memory_npu",
        "thread": "optimizer",
        "timed": "timing_npu attention_memory_npu attention_timing_npu",
    }
    runs.append(["--npu-sim=lazy", SWAP, f"--ignore={TRACED}"])
    for schedule, names in tests.items():
        files = [f"{SWAP}/tests/test_{name}.py" for name in ("optimizer_npu", *names.split())]
        runs.append([f"--npu-sim={schedule}", *files, "-k", "npu"])
    schedules = ("lazy", "early", "random", "eager", "thread", "timed")
    runs += [[f"--npu-sim={schedule}", TRACED] for schedule in schedules]

    runs += [
        [f"--npu-sim={schedule}", REUSE, "-k", "npu"] for schedule in ("lazy", "eager", "thread")
    ]
    # These start ranks themselves.
    ranks = [f"{DDP}/test_{name}_npu.py" for name in ("reduce", "failures")]
    runs.append(["--npu-sim=lazy", *ranks])
    runs.append(["--npu-sim=timed", f"{DDP}/test_overlap_npu.py"])

    # Two at a time: one process keeps one processor busy. What fails, nox shows itself.
    with ThreadPoolExecutor(2) as pool:
        for shown in pool.map(run, runs):
            sys.stdout.write(str(shown))


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run what is too long for the others: failures of a larger model, and triples of features."""
    session.run(sys.executable, "tools/environment.py", "npu", external=True)
    libraries = str(Path(".nox/ascend-sim").resolve())
    variables = {**TESTING, **SMALL_NPU, "ASCENDSIM_STRICT": "1", "ASCENDSIM_CACHE": libraries}
    run_tests(session, "tests_integration/test_pairs.py", "-m", "nightly")
    runs = [(schedule, SWAP) for schedule in ("lazy", "early", "eager", "thread")]
    runs += [("lazy", "tests_integration/test_pairs.py"), ("eager", ESTIMATE)]
    for schedule, tests in runs:
        options = [f"--npu-sim={schedule}", tests, "-m", "nightly"]
        options += ["--timeout=3600", *session.posargs]
        command = [".nox/npu/bin/python", "-m", "pytest", *options]
        whole = WHOLE if tests == ESTIMATE else {}
        session.run(*command, env={**variables, **whole}, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, types, the import contracts, function sizes, and that the pins agree."""
    run_shared(session, "python", "-m", "ruff", "check", ".")
    run_shared(session, "python", "-m", "ruff", "format", "--check", ".")
    run_shared(session, "python", "-m", "mypy")
    contracts = "from importlinter.cli import lint_imports_command as run; run()"
    run_shared(session, "python", "-c", contracts)
    run_shared(session, "python", "tools/sizes.py")
    run_shared(session, "python", "-m", "pip", "check")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    options = ["-W", "--keep-going", "-b", "html", *session.posargs]
    run_shared(session, "python", "-m", "sphinx", *options, "docs", "docs/_build/html")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run benchmarks: `-- NAME --json FILE`, or all that are there."""
    run_shared(session, "python", "-m", "benchmarks", *session.posargs)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Build every package's source archive and wheel into dist/."""
    for package in PACKAGES:
        options = ["--no-isolation", "--outdir", "dist", f"packages/{package}"]
        run_shared(session, "python", "-m", "build", *options)
