from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ascend_sim import _machine, cli


def test_run_needs_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == 2
    assert "needs a script" in capsys.readouterr().err


def test_a_refusal_is_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_machine, "installed", lambda name: None)
    assert cli.main(["doctor"]) == 2
    shown = capsys.readouterr()
    assert "torch      not installed (tested: 2.13.0)" in shown.out
    assert shown.err.startswith("ascend-sim: The simulated NPU")


def test_an_unknown_schedule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--schedule", "fast", "x.py"])
    assert "lazy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch.py"], "There is no script nosuch.py"),
        (["."], "There is no script ."),
        (["-m", "nosuch.part", "-q"], "There is no module nosuch.part"),
        (["-m"], "needs a script, or -m and a module"),
        (["--hbm", "10X", __file__], "'10X' is no size"),
        (["--devices", "65", __file__], "a whole number from 1 to 64"),
    ],
    ids=" ".join,
)
def test_what_cannot_run_is_refused_before_anything_starts(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert cli.main(["run", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "instead" in shown


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--devices", "two", "argument --devices: 'two' cannot be read: a whole number is needed"),
        ("--h2d-gbps", "fast", "argument --h2d-gbps: 'fast' cannot be read: a number is needed"),
        ("--hb", "64M", "--hb"),
    ],
)
def test_an_unreadable_option_is_named_as_it_was_written(
    flag: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", flag, text, __file__])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_every_option_of_the_device_is_one_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--hbm", "--query-stall", "--poison", "--strict"))
