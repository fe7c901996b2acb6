"""The sessions of the repository; `python3 -m nox --list` shows them.

What follows `--` reaches the session's tool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"  # the first with tags on nox.param
nox.options.sessions = ["tests"]

PACKAGES = sorted(path.parent.name for path in Path("packages").glob("*/pyproject.toml"))
TORCHES = ["2.13"]

# The tests' tensors are small: more threads than this only wait for one another. And bytecode is
# written even where the user's shell forbids it, since torch is installed without.
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": ""}

# torch_npu 2.13.0 registers true_divide for the CPU without a derivative, and torch warns of it.
OPERATORS = "packages/ascend-recompute/tests/test_policy.py::test_each_listed_operator_is"
TRUE_DIVIDE = [
    f"--deselect={OPERATORS}_recorded_and_rebuilt[{name}]"
    for name in ["torch.true_divide", "torch.Tensor.true_divide"]
]


def run_shared(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the environment that the sessions share; make it where it is not there."""
    session.run(sys.executable, "tools/environment.py", external=True)
    session.run(f".nox/shared/bin/{program}", *arguments, env=ENVIRONMENT, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small language model plain and once per feature; compare memory, time and bits."""
    run_shared(session, "ascend-suite", "demo", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests of every package (arguments go to pytest: `-- -k saved --cov`)."""
    run_shared(session, "python", "-m", "pytest", *session.posargs)


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
    run_shared(session, "python", "-m", "pytest", "tests_integration", *session.posargs)


@nox.session(venv_backend="none")
def npu(session: nox.Session) -> None:
    """Run the tests on the real torch_npu over a simulated NPU, in every schedule."""
    session.run(sys.executable, "tools/environment.py", "npu", external=True)
    libraries = str(Path(".nox/ascend-sim").resolve())
    strict = {**ENVIRONMENT, "ASCENDSIM_STRICT": "1", "ASCENDSIM_CACHE": libraries}
    for schedule in ["lazy", "eager", "thread"]:
        pytest = [".nox/npu/bin/python", "-m", "pytest", f"--npu-sim={schedule}"]
        session.run(*pytest, "packages/ascend-sim", *session.posargs, env=strict, external=True)
        # What does not run on the device runs once.
        chosen = TRUE_DIVIDE if schedule == "lazy" else ["-k", "npu"]
        tests = ["packages/ascend-core", "packages/ascend-recompute", *chosen, *session.posargs]
        session.run(*pytest, *tests, env=strict, external=True)


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
