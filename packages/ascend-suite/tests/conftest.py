from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

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
