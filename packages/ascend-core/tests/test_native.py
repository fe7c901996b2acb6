"""C is compiled once, kept, and asked for by what it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascend_core import native
from ascend_core.errors import UnavailableError

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/local/bin:/usr/bin:/bin"}


def test_a_library_is_compiled_and_called(source: Path, environment: dict[str, str]) -> None:
    assert native.load(source, environment=environment).answer() == 42


def test_a_library_is_compiled_once(source: Path, environment: dict[str, str]) -> None:
    path = native.compiled(source, environment=environment)
    before = path.stat().st_mtime_ns
    assert native.compiled(source, environment=environment) == path
    assert path.stat().st_mtime_ns == before
    kept = sorted(one.suffix for one in native.cache_folder(environment).iterdir())
    assert kept == [".lock", ".so"]


def test_another_source_is_another_library(source: Path, environment: dict[str, str]) -> None:
    first = native.compiled(source, environment=environment)
    source.write_text(SOURCE.replace("42", "43"))
    assert native.compiled(source, environment=environment) != first
    assert native.load(source, environment=environment).answer() == 43


def test_without_a_compiler_it_says_so(source: Path, environment: dict[str, str]) -> None:
    with pytest.raises(UnavailableError, match="there is no C compiler"):
        native.load(source, environment={**environment, "PATH": "/nowhere"})
    with pytest.raises(UnavailableError, match="the one that CC names"):
        native.load(source, environment={**environment, "CC": "no-such-compiler -O1"})


def test_what_the_compiler_says_is_quoted(source: Path, environment: dict[str, str]) -> None:
    source.write_text("int answer(void) { return question; }\n")
    with pytest.raises(UnavailableError, match="question"):
        native.load(source, environment=environment)
    assert not [*native.cache_folder(environment).glob("*.partial")]


def test_a_cache_that_cannot_be_written_is_named(
    source: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UnavailableError, match="cannot be compiled into"):
        native.load(source, environment=environment)


def test_a_library_that_is_spoilt_is_named(source: Path, environment: dict[str, str]) -> None:
    native.compiled(source, environment=environment).write_bytes(b"no library")
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        native.load(source, environment=environment)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/no/such/interpreter\n", "cannot be started"),
        ("not a program", "cannot be started"),
        ("#!/bin/sh\nprintf '\\377 no'; exit 1\n", "does not compile"),
        ("#!/bin/sh\nexit 3\n", "ended with 3 and said:\nnothing"),
    ],
)
def test_a_compiler_that_does_not_work_is_named(
    script: str, message: str, source: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    with pytest.raises(UnavailableError, match=message):
        native.load(source, environment={**environment, "CC": str(compiler)})


def test_a_command_that_is_none_is_named(source: Path, environment: dict[str, str]) -> None:
    with pytest.raises(UnavailableError, match="which is no command"):
        native.load(source, environment={**environment, "CC": 'gcc "'})
