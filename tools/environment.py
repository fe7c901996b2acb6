"""Make the environments that the nox sessions share, or leave them alone while they are right.

nox makes one environment per session, each with a torch of its own. So there are three here:

    .nox/torch-2.13   the pinned third-party packages: torch, the tools, what our packages declare
    .nox/shared       sees those, and holds the packages of this repository, editable,
                      megatron-core, on which the integration tests run, and Triton
    .nox/npu          as shared, and torch_npu instead of Triton: `import torch` needs a device

Usage: python tools/environment.py [TORCH | npu]

Without an argument the first two are made; with TORCH (as in constraints/torch-TORCH.txt) only the
first, which is what the isolated tests need; with `npu` the first and the third. Runs on the
interpreter that runs nox, and on what nox brings.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (nox itself may run on an older one)
    raise SystemExit(f"Python 3.11 or newer is needed; nox runs on {sys.version.split()[0]}.")

import tomllib

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13"
HEARTBEAT_SECONDS = 15

log = logging.getLogger("environment")


def third_party(torch: str) -> Path:
    """Make the environment that holds the pinned third-party packages.

    Args:
        torch: Which `constraints/torch-*.txt` to take.

    Returns:
        The folder of the environment.
    """
    pins = [ROOT / f"constraints/torch-{torch}.txt", ROOT / "constraints/tools.txt"]
    wanted = _requirements()

    def build(home: Path) -> None:
        _virtualenv(home)
        # Bytecode is written when a module is first imported: compiling all of torch takes longer.
        options = ["--no-compile", *(f"--constraint={pin}" for pin in pins)]
        _pip_install(f"install torch {torch} and the tools", home, *options, *wanted)

    return _ensure(ROOT / f".nox/torch-{torch}", [*wanted, *_texts(pins)], build)


def shared() -> Path:
    """Make the environment that holds this repository's packages, editable, beside the pinned ones.

    Returns:
        The folder of the environment.
    """
    pins = [ROOT / f"constraints/{name}.txt" for name in ("megatron", "triton")]
    return _with_packages(ROOT / ".nox/shared", *pins)


def npu() -> Path:
    """Make the environment that holds torch_npu too.

    Returns:
        The folder of the environment.
    """
    pins = [ROOT / f"constraints/{name}.txt" for name in ("megatron", "torch-npu")]
    return _with_packages(ROOT / ".nox/npu", *pins)


def _with_packages(home: Path, *more: Path) -> Path:
    """Make an environment of our packages and of what the files `more` pin."""
    below = third_party(TORCH)
    packages = sorted(ROOT.glob("packages/*/pyproject.toml"))
    versions = sorted(ROOT.glob("packages/*/src/*/_version.py"))

    def build(home: Path) -> None:
        _virtualenv(home, "--no-seed")
        (_site(home) / "third-party.pth").write_text(f"{_site(below)}\n")
        for pins in more:
            # Without dependencies: theirs would have pip choose a torch.
            _pip_install(f"install {pins.stem}", home, "--no-deps", f"--requirement={pins}")
        options = ["--no-deps", "--no-build-isolation"]
        editable = [f"--editable={path.parent}" for path in packages]
        _pip_install("install the packages", home, *options, *editable)

    made_of = [(below / ".key").read_text(), *_texts([*packages, *versions, *more])]
    return _ensure(home, made_of, build)


def _ensure(home: Path, made_of: list[str], build: Callable[[Path], None]) -> Path:
    """Build the environment at `home`, unless it was built from exactly `made_of` before."""
    described = "\n".join([str(home), sys.version, *made_of])
    key = hashlib.sha256(described.encode()).hexdigest()
    stamp = home / ".key"
    home.parent.mkdir(exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.is_file() and stamp.read_text() == key):
            shutil.rmtree(home, ignore_errors=True)
            build(home)
            stamp.write_text(key)
    return home


def _requirements() -> list[str]:
    """What the packages declare (extras and build systems included) and the root's `dev` group."""
    wanted = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"])
    for path in ROOT.glob("packages/*/pyproject.toml"):
        declared = tomllib.loads(path.read_text())
        extras = declared["project"].get("optional-dependencies", {})
        groups = [declared["project"]["dependencies"], declared["build-system"]["requires"]]
        wanted.update(*groups, *extras.values())
    return sorted(name for name in wanted if not name.startswith("ascend-"))


def _virtualenv(home: Path, *options: str) -> None:
    # virtualenv comes with nox; the standard library's venv lacks pip on Debian's own Python.
    command = [sys.executable, "-m", "virtualenv", "--quiet", "--no-periodic-update", *options]
    subprocess.run([*command, str(home)], check=True)


def _site(home: Path) -> Path:
    return home / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def _texts(paths: list[Path]) -> list[str]:
    return [path.read_text() for path in paths]


def _pip_install(step: str, home: Path, *arguments: str) -> None:
    """Run pip, which may take long, with a sign of life now and then."""
    began = time.monotonic()
    log.info("%s ...", step)
    pip = [str(home / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    process = subprocess.Popen([*pip, "install", *arguments])
    while True:
        try:
            code = process.wait(HEARTBEAT_SECONDS)
            break
        except subprocess.TimeoutExpired:
            log.info("%s ... %.0f s so far", step, time.monotonic() - began)
    if code:
        raise SystemExit(f"could not {step}: pip ended with {code} and said why above.")
    log.info("%s: done in %.0f s", step, time.monotonic() - began)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="environment: %(message)s")
    if sys.argv[1:] == ["npu"]:
        npu()
    elif sys.argv[1:]:
        third_party(sys.argv[1])
    else:
        shared()
