"""Features: finding them among the installed packages, and applying one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_core.errors import ConfigError, FeatureError, FeatureNotFoundError
from ascend_core.feature import ENTRY_POINT_GROUP, Feature, Handle, discover, get_feature

MODULE = """
import dataclasses

from ascend_core.feature import Feature


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 3


class On:
    def __init__(self, target, config):
        self.target, self.config = target, config

    def report(self):
        return {"size": self.config.size}

    def remove(self):
        self.target = None


FEATURE = Feature("grow", "Grows.", Config, "%(module)s:On", "model")
OTHER = Feature("grow", "Grows otherwise.", Config, "%(module)s:Config", "model")
NOTHING = 3
LOST = Feature("lost", "Has no verb.", Config, "%(module)s:nowhere", "model")
"""

Install = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a small package with entry points, as pip would, into a folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module: str, entries: Mapping[str, str]) -> None:
        (tmp_path / f"{module}.py").write_text(MODULE % {"module": module})
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = [f"{name} = {module}:{value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines]))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install


def test_a_feature_of_an_installed_package_is_found_and_applied(install: Install) -> None:
    install("growing_package", {"grow": "FEATURE"})
    feature = discover()["grow"]
    handle = feature.apply("model")
    assert isinstance(handle, Handle)
    assert handle.report() == {"size": 3}
    assert feature.apply("model", feature.config(size=5)).report() == {"size": 5}
    assert get_feature("grow") == feature


def test_features_come_in_the_order_of_their_names(install: Install) -> None:
    install("growing_package", {"zoom": "LOST", "grow": "FEATURE"})
    names = [name for name in discover() if name in ("grow", "lost")]
    assert names == ["grow", "lost"]


def test_an_unknown_name_lists_those_that_are_there(install: Install) -> None:
    install("growing_package", {"grow": "FEATURE"})
    with pytest.raises(FeatureNotFoundError, match=r"'shrink'[\s\S]*grow"):
        get_feature("shrink")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("NOTHING", "is no feature"),
        ("missing", "cannot be loaded"),
    ],
)
def test_an_entry_point_that_is_wrong_is_named(install: Install, entry: str, message: str) -> None:
    install("growing_package", {"grow": entry})
    with pytest.raises(FeatureError, match=rf"'grow'[\s\S]*{message}"):
        discover()


def test_a_package_that_cannot_be_imported_is_named(install: Install, tmp_path: Path) -> None:
    install("broken_package", {"grow": "FEATURE"})
    (tmp_path / "broken_package.py").write_text("import not_installed_anywhere")
    with pytest.raises(FeatureError, match="not_installed_anywhere"):
        discover()


def test_two_packages_may_not_offer_different_features_of_one_name(install: Install) -> None:
    install("growing_package", {"grow": "FEATURE"})
    install("rival_package", {"grow": "OTHER"})
    with pytest.raises(FeatureError, match="two installed packages"):
        discover()


def test_one_feature_may_be_registered_twice(install: Install) -> None:
    install("growing_package", {"grow": "FEATURE", "also-grow": "FEATURE"})
    assert "grow" in discover()


def test_a_config_of_another_feature_is_refused(install: Install) -> None:
    @dataclasses.dataclass(frozen=True)
    class Foreign:
        pass

    install("growing_package", {"grow": "FEATURE"})
    with pytest.raises(ConfigError, match="was given a Foreign"):
        discover()["grow"].apply("model", Foreign())


def test_a_verb_gets_what_its_feature_takes_and_keyword_arguments(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("growing_package", {"grow": "FEATURE"})
    feature = discover()["grow"]

    def verb(*given: object, **named: object) -> tuple[object, ...]:
        return *given, named

    monkeypatch.setattr(sys.modules["growing_package"], "On", verb)
    assert feature.apply("model", wrap=3) == ("model", feature.config(), {"wrap": 3})
    taking = dataclasses.replace(feature, takes="shrink")
    assert taking.apply("model", taken="handle") == ("model", "handle", feature.config(), {})
    with pytest.raises(ConfigError, match=r"given no handle of shrink[\s\S]*apply shrink first"):
        taking.apply("model")
    with pytest.raises(ConfigError, match="was given a str to take"):
        feature.apply("model", taken="handle")


def test_a_verb_that_is_not_there_is_named(install: Install) -> None:
    install("growing_package", {"lost": "LOST"})
    with pytest.raises(FeatureError, match="growing_package:nowhere"):
        discover()["lost"].apply("model")


def test_features_are_values() -> None:
    def feature(**changes: Any) -> Feature:
        fields = dict(name="a", summary="", config=int, verb="m:f", target="model")
        return Feature(**{**fields, **changes})

    assert feature() == feature()
    assert feature() != feature(verb="m:g")
    with pytest.raises(dataclasses.FrozenInstanceError):
        feature().name = "b"  # type: ignore[misc]
