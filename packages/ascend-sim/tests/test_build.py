"""The build, on a library that needs no torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

from ascend_sim import BuildError, _build
from ascend_sim._build import Library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"ASCENDSIM_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one source file of the one library."""
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    library = Library("libsmall.so", (path,), ("-fvisibility=default",))
    monkeypatch.setattr(_build, "libraries", lambda: [library])
    return path


@pytest.mark.usefixtures("source")
def test_what_was_compiled_loads_and_nothing_else_is_left(environment: dict[str, str]) -> None:
    assert _build.built(environment) is None
    home = _build.build(environment)
    assert ctypes.CDLL(str(home / "libsmall.so")).answer() == 42
    assert [path.name for path in home.iterdir()] == ["libsmall.so"]
    assert {path.suffix for path in home.parent.iterdir()} == {"", ".lock"}
    assert _build.built(environment) == home


@pytest.mark.usefixtures("source")
def test_it_compiles_once(environment: dict[str, str]) -> None:
    first = _build.build(environment) / "libsmall.so"
    made = first.stat().st_mtime_ns
    assert (_build.build(environment) / "libsmall.so").stat().st_mtime_ns == made


@pytest.mark.usefixtures("source")
def test_another_compiler_or_flag_is_another_build(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = _build.build(environment)
    assert _build.built({**environment, "ASCENDSIM_CXX": "g++ -O3"}) is None
    monkeypatch.setattr(_build, "_FLAGS", (*_build._FLAGS, "-DOTHER"))
    assert _build.built(environment) != home


@pytest.mark.usefixtures("source")
def test_another_version_of_the_sources_is_another_build(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = tmp_path / "native"
    native.mkdir()
    (native / "one.h").write_text("// one\n")
    monkeypatch.setattr(_build, "NATIVE", native)
    home = _build.build(environment)
    (native / "one.h").write_text("// two\n")
    assert _build.built(environment) != home


def test_a_failure_shows_what_the_compiler_said_and_leaves_nothing(
    environment: dict[str, str], source: Path
) -> None:
    source.write_text("int broken( { }\n")
    with pytest.raises(BuildError, match=r"small\.cpp:1:\d+: error:") as caught:
        _build.build(environment)
    assert "g++" in caught.value.why
    assert not [path for path in Path(environment["ASCENDSIM_CACHE"]).iterdir() if path.is_dir()]
    source.write_text('extern "C" int answer() { return 1; }\n')
    assert _build.build(environment).is_dir()


@pytest.mark.usefixtures("source")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with pytest.raises(BuildError, match=f"cannot be compiled into {cache}") as caught:
        _build.build({"ASCENDSIM_CACHE": str(cache)})
    assert "ASCENDSIM_CACHE" in caught.value.instead


@pytest.mark.usefixtures("source")
def test_what_was_compiled_may_be_read_by_whom_the_umask_lets(environment: dict[str, str]) -> None:
    before = os.umask(0o027)
    try:
        home = _build.build(environment)
    finally:
        os.umask(before)
    assert stat.S_IMODE(home.stat().st_mode) == 0o750


@pytest.mark.usefixtures("source")
def test_what_a_killed_build_left_is_no_obstacle(environment: dict[str, str]) -> None:
    home = _build.build(environment)
    home.rename(home.with_suffix(".partial"))
    assert _build.build(environment) == home
    assert not home.with_suffix(".partial").exists()


@pytest.mark.usefixtures("source")
def test_a_missing_compiler_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(BuildError, match="there is no compiler no-such-compiler") as caught:
        _build.build({**environment, "ASCENDSIM_CXX": "no-such-compiler -O2"})
    assert "ASCENDSIM_CXX" in caught.value.instead


@pytest.mark.usefixtures("source")
def test_a_compiler_that_breaks_is_quoted(environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho internal compiler error; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match=r"(?s)ended with 3.*internal compiler error"):
        _build.build({**environment, "ASCENDSIM_CXX": str(broken)})


def test_processes_that_start_together_compile_once(
    environment: dict[str, str], source: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    counting = tmp_path / "counting-g++"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    counting.chmod(0o755)
    environment["ASCENDSIM_CXX"] = str(counting)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_build.build, args=(environment,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text().count(str(source)) == 1


@pytest.mark.usefixtures("source")
def test_a_line_tells_that_it_compiles(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _build.build(environment)
    assert "ascend-sim: compiling 1 files" in capsys.readouterr().err
    _build.build(environment)
    assert capsys.readouterr().err == ""


def test_the_cache_is_the_users() -> None:
    assert _build.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/ascend-sim")
    assert _build.cache_folder({"ASCENDSIM_CACHE": "/y", "XDG_CACHE_HOME": "/x"}) == Path("/y")
    assert _build.cache_folder({}) == Path(os.path.expanduser("~/.cache/ascend-sim"))
