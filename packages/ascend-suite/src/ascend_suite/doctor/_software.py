"""What is installed. Imports none of it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ascend_core import native
from ascend_core.errors import AscendError
from ascend_core.feature import discover
from ascend_suite.doctor.machine import Cann, Compiler

__all__ = ["cann", "compiler", "loadable_features", "suite_requirements"]

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*\(?((?:[=<>!~]=?|===)[^;)]*)?\)?\s*(;.*)?$")
_PROGRAM = """
#include <math.h>
#include <stdint.h>

double one(double x) { return sqrt(x * x); }
"""


def suite_requirements() -> dict[str, str]:
    """What `ascend-suite` declares to need, without its extras: `{"ascend-core": "==0.1.0"}`."""
    found = {}
    for line in metadata.requires("ascend-suite") or ():
        match = _REQUIREMENT.match(line)
        if match and "extra" not in (match[3] or ""):
            found[match[1].lower()] = (match[2] or "").strip()
    return found


def loadable_features() -> tuple[tuple[str, ...], str | None]:
    """Names of the installed features, or why they cannot be loaded."""
    try:
        return tuple(discover()), None
    except AscendError as error:
        return (), f"{error.what} {error.why or ''}".strip()


def cann(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Cann:
    """Look for CANN where its variables point, and in its usual place."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    usual = next((p for p in _usual_toolkits(root) if p.is_dir()), None)
    toolkit = Path(home) if home else usual
    return Cann(
        home=home,
        installed=None if usual is None else str(usual),
        version=None if toolkit is None else _toolkit_version(toolkit),
        driver=_entry(root / "usr/local/Ascend/driver/version.info", "Version"),
    )


def compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Compile a small C file as the native kernels are compiled, and look at their cache."""
    failure = command = cache = None
    try:
        command = " ".join(native.compiler_command(environment))
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "doctor.c"
            source.write_text(_PROGRAM)
            native.compiled(source, environment={**environment, "XDG_CACHE_HOME": folder})
    except AscendError as error:
        failure = f"{error.what} {error.why or ''}".strip()
    cache_failure = None
    try:
        folder_of_cache = native.cache_folder(environment)
        cache = str(folder_of_cache)
        cache_failure = _unwritable(folder_of_cache)
    except AscendError as error:
        cache_failure = f"{error.what} {error.why or ''}".strip()
    return Compiler(command=command, failure=failure, cache=cache, cache_failure=cache_failure)


def _usual_toolkits(root: Path) -> Iterator[Path]:
    for place in ("usr/local/Ascend", "root/Ascend"):
        yield root / place / "ascend-toolkit/latest"
        yield root / place / "cann"


def _toolkit_version(toolkit: Path) -> str | None:
    """Read the toolkit's version where its installer writes it.

    `Version` in a component's version.info counts otherwise: 7.7 is a part of CANN 8.2.
    """
    installed = sorted(toolkit.glob("*-linux/ascend_toolkit_install.info"))
    places = [(path, "version") for path in installed]
    places += [
        (toolkit / "version.cfg", "toolkit_installed_version"),
        (toolkit / "version.cfg", "toolkit_running_version"),
        (toolkit / "compiler/version.info", "version_dir"),
    ]
    found = (_entry(path, key) for path, key in places)
    return next((version for version in found if version), None)


def _entry(path: Path, key: str) -> str | None:
    """Read the value of `key=value` in a file; the part after a colon where there is one."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == key:
            return value.strip().strip("[]").rpartition(":")[2] or None
    return None


def _unwritable(folder: Path) -> str | None:
    """Say why nothing can be written to a folder, be it there yet or not. Makes nothing."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"
