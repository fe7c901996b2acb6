"""Prove that a package works from its wheel, beside nothing but what it declares.

Usage: python tools/isolated.py PACKAGE

Runs on the python of the pinned third-party environment, where none of our packages is installed.
The wheel of PACKAGE and those of the siblings it declares go into an empty folder; the checks and
the smoke test (`packages/PACKAGE/tests/smoke.py`) then run with that folder on the path.
"""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
# Imported lazily, where they are there; the user installs them to suit the machine's drivers.
BROUGHT_BY_THE_USER = {"megatron", "torch_npu", "triton"}

log = logging.getLogger("isolated")


def check_package(package: str) -> None:
    """Build, install and check one package.

    Raises:
        SystemExit: When something is wrong; the message says what.
    """
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder, "wheels"), Path(folder, "site")
        siblings = sorted(declared_siblings(package))
        sources = [ROOT / "packages" / name for name in [package, *siblings]]
        _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, *sources)
        _pip("install", "--no-deps", "--no-compile", "--target", site, *wheels.glob("*.whl"))
        module = package.replace("-", "_")
        [wheel] = wheels.glob(f"{module}-*.whl")
        problems = [*wheel_problems(wheel), *import_problems(site / module, package)]
        if problems:
            raise SystemExit("\n".join(f"{package}: {problem}" for problem in problems))
        _run_beside(site, "-c", f"import sys, {module}; assert 'torch' not in sys.modules")
        for other in {path.name for path in ROOT.glob("packages/*")} - {package, *siblings}:
            hidden = f"assert importlib.util.find_spec({other.replace('-', '_')!r}) is None"
            _run_beside(site, "-c", f"import importlib.util; {hidden}")
        _run_beside(site, str(ROOT / "packages" / package / "tests/smoke.py"))
    log.info("%s works beside %s", package, ", ".join(siblings) or "torch alone")


def declared_siblings(package: str) -> set[str]:
    """Name the packages of this repository that a package needs, directly or not."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    names = {Requirement(line).name for line in project["dependencies"]}
    direct = {name for name in names if (ROOT / "packages" / name).is_dir()}
    return direct.union(*map(declared_siblings, direct))


def wheel_problems(wheel: Path) -> Iterator[str]:
    """Say what a wheel holds that it should not, and what it lacks."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [PurePosixPath(name) for name in archive.namelist()]
    module = wheel.name.split("-")[0]
    tops = {path.parts[0] for path in paths if not path.parts[0].endswith(".dist-info")}
    if tops != {module}:
        yield f"the wheel holds {sorted(tops)} at its top, not {module} alone."
    names = {part for path in paths for part in path.parts}
    tests = {name for name in names if name == "tests" or name.startswith(("test_", "conftest"))}
    if tests:
        yield f"the wheel holds tests: {sorted(tests)}."
    yield from (f"the wheel lacks {name}." for name in ("py.typed", "LICENSE") if name not in names)


def import_problems(source: Path, package: str) -> Iterator[str]:
    """Say which imports of an installed package nothing declares."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    declared = {Requirement(line).name for line in lines}
    provided = {name.replace("-", "_") for name in [package, *declared]}
    for name, distributions in metadata.packages_distributions().items():
        if declared.intersection(distributions):
            provided.add(name)
    known = provided | sys.stdlib_module_names | BROUGHT_BY_THE_USER
    for path in sorted(source.rglob("*.py")):
        for name in sorted(set(_imported(ast.parse(path.read_text()))) - known):
            yield f"{path.relative_to(source.parent)} imports {name}, which pyproject.toml lacks."


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level names that a module imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _pip(*arguments: str | Path) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run_beside(site: Path, *arguments: str) -> None:
    # -P: neither the repository nor the script's own folder is on the path, only `site`.
    _run([sys.executable, "-P", "-W", "error", *arguments], PYTHONPATH=str(site))


def _run(command: Iterable[str | Path], **environment: str) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, env={**os.environ, **environment}, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(words)}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="isolated: %(message)s")
    check_package(sys.argv[1])
