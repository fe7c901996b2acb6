"""Public names that are imported when they are first read."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from ascend_core._lazy import lazy_exports


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    module = types.ModuleType("lazy_package")
    sys.modules[module.__name__] = module
    module.__getattr__, module.__dir__ = lazy_exports(  # type: ignore[method-assign, assignment]
        module.__name__, {"Fraction": "fractions", "absent": "fractions"}
    )
    yield module
    del sys.modules[module.__name__]


def test_name_is_imported_from_its_module_and_kept(package: types.ModuleType) -> None:
    from fractions import Fraction

    assert "Fraction" not in vars(package)
    assert package.Fraction is Fraction
    assert vars(package)["Fraction"] is Fraction


def test_unknown_name_raises_as_any_module_does(package: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'nothing'"):
        _ = package.nothing


def test_name_that_its_module_lacks_is_an_error_too(package: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match="absent"):
        _ = package.absent


def test_dir_lists_names_before_they_are_imported(package: types.ModuleType) -> None:
    assert "Fraction" in dir(package)
    assert "__name__" in dir(package)
