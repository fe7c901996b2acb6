"""Compile C that a package ships as source, once per machine, and load it.

    <cache>/<key>.so        a library, complete or not there
    <cache>/<key>.lock      held while it is compiled, so that processes compile once
    <cache>/<key>.*.partial what a compiler writes, before it is renamed

The cache is `ascend-suite/native` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`).
The key is a hash of the source, the flags, the compiler and the processor: a library that was
compiled for another machine is not loaded where machines share a home.

The code knows no torch: it is called by ctypes, with addresses. It is loaded after torch, so that
its OpenMP is torch's where that has the usual name, and its threads are torch's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_core.errors import UnavailableError

__all__ = ["cache_folder", "compiled", "compiler_command", "function_of", "load"]

_COMPILERS = ("cc", "gcc", "clang")
# Without contraction, a product and a sum are rounded each, on every machine. Without errno and
# traps, which nobody reads, roots and choices become vectors.
_ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = ("-std=c11", "-O3", *_ARITHMETIC, "-fPIC", "-shared")
# What a compiler may lack, from the first that is given up: threads, then this processor's vectors.
_WISHES = ("-march=native", "-fopenmp")
_LONGEST_OUTPUT = 40  # lines of the compiler's output that an error quotes


def load(source: Path, *, environment: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Load the library of a C file; compile it where that was not done yet.

    Args:
        source: The file, which includes no file of its own.
        environment: Where `CC`, `XDG_CACHE_HOME` and `PATH` are read.

    Raises:
        UnavailableError: When there is no compiler, or it fails, or the cache cannot be written.
    """
    path = compiled(source, environment=environment)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(
            f"{path} cannot be loaded.",
            why=str(error),
            instead="remove it, and it is compiled again.",
        ) from error


def function_of(library: ctypes.CDLL, name: str, source: Path) -> Any:
    """Find a function of a library that `load` has returned.

    Args:
        library: It.
        name: The function's name.
        source: What the library was compiled from.

    Raises:
        UnavailableError: When the library does not have it.
    """
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise UnavailableError(
            f"the library that was compiled from {source.name} has no {name}.",
            why="the compiler ended well and left something else.",
            instead="remove it from the cache, or name another compiler in CC.",
        ) from error


def compiled(source: Path, *, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the library of a C file is, once it is compiled.

    Raises:
        UnavailableError: See `load`.
    """
    compiler = compiler_command(environment)
    cache = cache_folder(environment)
    library = cache / f"{source.stem}-{_key(source, compiler)}.so"
    if library.is_file():
        return library
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile(source, compiler, library)
    except OSError as error:
        raise UnavailableError(
            f"{source.name} cannot be compiled into {cache}.",
            why=str(error),
            instead="set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    return library


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which libraries are kept."""
    folder = environment.get("XDG_CACHE_HOME")
    try:
        cache = Path(folder) if folder else Path.home() / ".cache"
    except RuntimeError as error:
        raise UnavailableError(
            "there is no folder to compile native code into.",
            why=str(error),
            instead="set XDG_CACHE_HOME to a folder that can be written.",
        ) from error
    return cache / "ascend-suite" / "native"


def compiler_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words that start the C compiler.

    Raises:
        UnavailableError: When there is none.
    """
    search = environment.get("PATH")
    try:
        wanted = shlex.split(environment.get("CC", ""))
    except ValueError as error:
        raise UnavailableError(
            f"CC is {environment['CC']!r}, which is no command.",
            why=str(error),
            instead="name a C compiler in it, or unset it.",
        ) from error
    for words in [wanted] if wanted else [[name] for name in _COMPILERS]:
        if found := shutil.which(words[0], path=search):
            return [found, *words[1:]]
    named = "the one that CC names" if wanted else f"one of {', '.join(_COMPILERS)}"
    raise UnavailableError(
        "native code cannot be compiled: there is no C compiler.",
        why=f"{named} would be it, and is not on the PATH.",
        instead="install one, or name it in CC; what needs none goes on without.",
    )


def _key(source: Path, compiler: Sequence[str]) -> str:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise UnavailableError(
            f"the C compiler {shlex.join(compiler)} cannot be started.",
            why=str(error),
            instead="name another one in CC; what needs none goes on without.",
        ) from error
    parts = [source.read_bytes(), repr((_FLAGS, _WISHES, compiler)).encode(), version, _processor()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _processor() -> bytes:
    """What tells processors apart, as far as a compiler's choice of instructions goes."""
    general = " ".join((platform.system(), platform.machine(), platform.processor()))
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return general.encode()
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join([general, *(line for line in lines if line.startswith(kept))]).encode()


def _compile(source: Path, compiler: Sequence[str], library: Path) -> None:
    """Compile to another name, and give the library its own once it is complete."""
    handle, partial = tempfile.mkstemp(".partial", f"{library.stem}.", library.parent)
    os.close(handle)
    try:
        for kept in range(len(_WISHES), -1, -1):
            flags = [*_FLAGS, *_WISHES[:kept]]
            done = subprocess.run(
                [*compiler, *flags, "-o", partial, str(source), "-lm"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode == 0:
                Path(partial).replace(library)
                return
    finally:
        Path(partial).unlink(missing_ok=True)
    said = "\n".join(done.stdout.splitlines()[:_LONGEST_OUTPUT])
    raise UnavailableError(
        f"{source.name} does not compile.",
        why=f"{shlex.join(compiler)} ended with {done.returncode} and said:\n{said or 'nothing'}",
        instead="name another compiler in CC; what needs none goes on without.",
    )
