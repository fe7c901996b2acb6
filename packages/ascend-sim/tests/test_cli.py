from __future__ import annotations

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


def test_every_option_of_the_device_is_one_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--hbm", "--query-stall", "--poison", "--strict"))
