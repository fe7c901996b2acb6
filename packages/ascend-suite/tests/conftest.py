from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import distributed

from ascend_suite.demo.settings import DemoSettings


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The features of `suite_test_features`, importable by the names in their verbs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("suite_test_features")


@pytest.fixture
def tiny() -> DemoSettings:
    """Settings with which a run takes a fraction of a second, and the loss still falls."""
    return DemoSettings(
        layers=2,
        hidden=32,
        seq=32,
        batch=4,
        steps=9,
        memory_steps=2,
        time_rounds=2,
        timed_steps=1,
    )


@pytest.fixture
def session_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install the features of `session_features`, as a package would."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "session_features-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: session_features\nVersion: 1.0\n")
    names = ("early", "middle", "late")
    lines = [f"test-{name} = session_features:{name.upper()}" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[ascend.features]", *lines]))
    module = importlib.import_module("session_features")
    module.HAPPENED.clear()
    return module


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
