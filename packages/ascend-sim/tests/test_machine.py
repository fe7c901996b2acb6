from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import ascend_sim
from ascend_sim import RefusedError, _machine


@pytest.fixture
def no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)


@pytest.mark.usefixtures("no_torch_npu")
def test_a_real_cann_in_the_environment_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"beside a real CANN.*\n.*ASCEND_HOME_PATH is /opt"):
        _machine.check({"ASCEND_HOME_PATH": "/opt/cann"})


@pytest.mark.usefixtures("no_torch_npu")
def test_a_real_library_on_the_loaders_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libascendcl.so").touch()
    with pytest.raises(RefusedError, match="LD_LIBRARY_PATH leads to"):
        _machine.check({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})


@pytest.mark.usefixtures("no_torch_npu")
@pytest.mark.parametrize(("name", "found"), [("torch", "2.12.0"), ("torch-npu", "2.13.0rc1")])
def test_an_untested_version_is_refused(
    name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {**_machine.TESTED, name: found}
    monkeypatch.setattr(_machine, "installed", versions.get)
    with pytest.raises(RefusedError, match=f"needs {name} 2.13.0, and found {found}") as caught:
        _machine.check({})
    assert "pip install" in caught.value.instead


@pytest.mark.usefixtures("no_torch_npu")
def test_a_missing_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "installed", {"torch": "2.13.0"}.get)
    with pytest.raises(RefusedError, match=r"needs torch-npu 2\.13\.0, and found none"):
        _machine.check({})


def test_torch_npu_that_was_imported_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(RefusedError, match="torch_npu was imported already") as caught:
        _machine.check({})
    assert "ascend-sim run" in caught.value.instead


def test_a_config_and_options_together_are_refused() -> None:
    with pytest.raises(RefusedError, match="not both"):
        ascend_sim.start(ascend_sim.SimConfig(), devices=2)
