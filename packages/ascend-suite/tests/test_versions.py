"""The order of versions, as PEP 440 and vendors write them."""

from __future__ import annotations

import itertools

import pytest

from ascend_suite.versions import Version

IN_ORDER = ["2.9.1", "2.13.0.dev20260101", "2.13a1", "2.13b2", "2.13.0rc1", "2.13.0rc2", "2.13.0"]
IN_ORDER += ["2.13.0.post1", "2.13.0.post2", "2.13.1", "8.2.RC2", "8.3.RC1", "8.3", "8.10"]


def of(text: str) -> Version:
    version = Version.of(text)
    assert version is not None
    return version


def test_order() -> None:
    for earlier, later in itertools.pairwise(IN_ORDER):
        assert of(earlier) < of(later), (earlier, later)
        assert not of(later) < of(earlier)


@pytest.mark.parametrize(
    ("one", "other"),
    [("2.13", "2.13.0"), ("2.13.0+cu128", "2.13"), ("v8.3.RC1", "8.3rc1"), ("1.0-rc.1", "1rc1")],
)
def test_one_version_written_twice(one: str, other: str) -> None:
    assert of(one) == of(other)


@pytest.mark.parametrize("text", ["", "unknown", None, 2.13, "git-abc"])
def test_what_is_no_version(text: object) -> None:
    assert Version.of(text) is None


def test_words_that_say_nothing_of_order() -> None:
    assert of("2.13.0.nightly") == of("2.13.0")
