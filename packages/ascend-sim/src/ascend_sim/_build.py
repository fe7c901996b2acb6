"""Compile the native code, once per version of it, of torch and of the compiler.

    <cache>/<key>/        the libraries, complete or not there
    <cache>/<key>.lock    held while they are compiled, so that processes compile once
    <cache>/<key>.partial/  where they are compiled

The cache is `$ASCENDSIM_CACHE`, else `ascend-sim` in the user's cache folder. The key is a hash of
everything that the libraries are made of.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from ascend_sim import _machine
from ascend_sim._runtime import ALLOCATORS, KERNELS, LIBRARIES
from ascend_sim.errors import BuildError

NATIVE = Path(__file__).parent / "native"
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
_LONGEST_OUTPUT = 60  # lines of the compiler's output that an error quotes


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared library, and what it is made of.

    Attributes:
        name: The file's name, which is its SONAME too.
        sources: C++ files.
        flags: For the compiler.
        links: For the linker.
        prefix: A header to compile once and to put before each source; the flags of all libraries
            with the same prefix are the same.
    """

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    prefix: Path | None = None


def libraries() -> list[Library]:
    """Name the libraries, in the order in which they must be linked."""
    torch, torch_npu = _machine.folder_of("torch"), _machine.folder_of("torch_npu")
    includes = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        torch_npu / "include",
        torch_npu / "include/third_party/acl/inc",
    ]
    # System headers: their warnings are not ours.
    flags = ("-O1", *(f"-isystem{path}" for path in includes), "-D_GLIBCXX_USE_CXX11_ABI=1")
    flags += ("-ffp-contract=off", "-Wno-interference-size")
    links = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
    npu_links = (f"-L{torch_npu / 'lib'}", "-ltorch_npu", f"-Wl,-rpath,{torch_npu / 'lib'}")
    prefix = NATIVE / "prefix.h"
    runtime, *aliases = LIBRARIES
    alias_links = ("-Wl,--no-as-needed", f"-l:{runtime}", "-Wl,-rpath,$ORIGIN")
    return [
        # Integers wrap, as those of torch.
        Library(runtime, _sources("runtime") + _sources("hccl"), ("-O2", "-fwrapv")),
        *(Library(name, _sources("alias"), (), alias_links) for name in aliases),
        Library(ALLOCATORS, _sources("allocators"), flags, links + npu_links, prefix),
        Library(KERNELS, _sources("kernels"), flags, links, prefix),
    ]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder under which compiled libraries are kept."""
    if own := environment.get("ASCENDSIM_CACHE"):
        return Path(own)
    home = environment.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ascend-sim"


def built(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the libraries where they are compiled already, else None."""
    home = cache_folder(environment) / _key(_compiler(environment), libraries())
    return home if home.is_dir() else None


def build(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the compiled libraries; compile them where they are not there.

    Raises:
        BuildError: When the cache cannot be written, or there is no compiler or it fails; then the
            message has the compiler's output.
    """
    compiler, wanted = _compiler(environment), libraries()
    cache = cache_folder(environment)
    home = cache / _key(compiler, wanted)
    if home.is_dir():
        return home
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with home.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not home.is_dir():
                _build_into(home, compiler, wanted)
    except OSError as error:
        raise BuildError(
            f"The simulated NPU cannot be compiled into {cache}.",
            why=str(error),
            instead="name a folder that can be written in ASCENDSIM_CACHE",
        ) from error
    return home


def _build_into(home: Path, compiler: list[str], wanted: list[Library]) -> None:
    """Compile in a folder of its own, and give that its name once it is complete."""
    folder = home.with_suffix(".partial")  # of a process that was killed, if it is there
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        objects = _compile(compiler, wanted, folder)
        for library in wanted:
            _link(compiler, library, [objects[library, path] for path in library.sources], folder)
        for path in objects.values():
            path.unlink()
        folder.rename(home)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _compile(
    compiler: list[str], wanted: list[Library], folder: Path
) -> dict[tuple[Library, Path], Path]:
    """Compile every file, as many at a time as there are processors."""
    objects = {
        (library, source): folder / f"{library.name}-{source.stem}.o"
        for library in wanted
        for source in library.sources
    }
    began = time.monotonic()
    _progress(f"compiling {len(objects)} files, once (a minute or two)")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        prefixes = {library.prefix: library for library in wanted if library.prefix}
        compiled = {
            prefix: pool.submit(_precompile, compiler, library, folder)
            for prefix, library in prefixes.items()
        }
        jobs = []
        # What needs no prefix is first in the pool, beside the prefix.
        for (library, source), path in sorted(objects.items(), key=lambda o: bool(o[0][0].prefix)):
            first = compiled[library.prefix].result() if library.prefix else ()
            flags = [*_FLAGS, *library.flags, *first]
            jobs.append(pool.submit(_run, [*compiler, *flags, "-c", str(source), "-o", str(path)]))
        _await(jobs, pool)
    for path in folder.glob("*.h*"):
        path.unlink()
    _progress(f"compiled in {time.monotonic() - began:.0f} s")
    return objects


def _precompile(compiler: list[str], library: Library, folder: Path) -> tuple[str, str]:
    """Compile a library's prefix, and return the flags that put it before a source."""
    assert library.prefix is not None
    header = folder / library.prefix.name
    shutil.copyfile(library.prefix, header)
    flags = [*_FLAGS, *library.flags, "-x", "c++-header"]
    _run([*compiler, *flags, str(header), "-o", f"{header}.gch"])
    return ("-include", str(header))


def _await(jobs: list[Future[None]], pool: ThreadPoolExecutor) -> None:
    """Wait for all jobs; when one fails, those that have not begun are dropped."""
    try:
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            _progress(f"compiled {done} of {len(jobs)} files", over=True)
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


def _link(compiler: list[str], library: Library, objects: list[Path], folder: Path) -> None:
    soname = f"-Wl,-soname,{library.name}"
    output = ["-o", str(folder / library.name), f"-L{folder}", soname]
    _run([*compiler, "-shared", "-pthread", *map(str, objects), *output, *library.links])


def _run(words: list[str]) -> None:
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise _no_compiler(words[0], error) from error
    if done.returncode:
        lines = done.stdout.splitlines()
        shown = "\n".join(lines[:_LONGEST_OUTPUT])
        raise BuildError(
            f"The simulated NPU does not compile: {words[0]} ended with {done.returncode}.",
            why=f"{shlex.join(words)}\n{shown}",
            instead="g++ 12 or newer; ASCENDSIM_CXX names another compiler",
        )


def _no_compiler(name: str, error: OSError) -> BuildError:
    return BuildError(
        f"The simulated NPU does not compile: there is no compiler {name}.",
        why=str(error),
        instead="install g++ 12 or newer, or name a compiler in ASCENDSIM_CXX",
    )


def _compiler(environment: Mapping[str, str]) -> list[str]:
    return shlex.split(environment.get("ASCENDSIM_CXX") or "g++")


def _key(compiler: list[str], wanted: list[Library]) -> str:
    digest = hashlib.sha256()
    for part in _ingredients(compiler, wanted):
        digest.update(part + b"\0")
    return digest.hexdigest()[:16]


def _ingredients(compiler: list[str], wanted: list[Library]) -> Iterator[bytes]:
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise _no_compiler(compiler[0], error) from error
    yield version
    yield repr([compiler, _FLAGS, *(library.flags + library.links for library in wanted)]).encode()
    yield repr({name: _machine.installed(name) for name in _machine.TESTED}).encode()
    for path in sorted(NATIVE.rglob("*")):
        if path.suffix in {".cpp", ".h"}:
            yield str(path.relative_to(NATIVE)).encode()
            yield path.read_bytes()


def _sources(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((NATIVE / folder).glob("*.cpp")))


def _progress(text: str, *, over: bool = False) -> None:
    """Write a line to stderr; on a terminal, `over` writes it over the one before."""
    terminal = sys.stderr.isatty()
    if over and not terminal:
        return
    end = "\r" if over else "\n"
    sys.stderr.write(f"ascend-sim: {text}{end}")
    sys.stderr.flush()
