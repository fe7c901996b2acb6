"""What a value may be, by the annotation of its option."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from ascend_suite._kinds import FromCode, fits, frozen, hints_of, in_words, is_code, meant_by
from ascend_swap import SwapAttentionConfig


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        ("a", str),
        (None, int | None),
        (None, Optional[int]),  # noqa: UP045
        ("a", Literal["a", "b"]),
        (1, Literal[1, "b"]),
        (["a"], Sequence[str]),
        (("a",), str | Sequence[str]),
        ([], list[int]),
        (range(3), Sequence[int]),
        ("a", os.PathLike[str]),
        (Path("a"), str | os.PathLike[str] | None),
        (len, Callable[[], Any]),
        (Path, type[FromCode]),
    ],
)
def test_a_value_fits(value: object, kind: Any) -> None:
    assert fits(value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (True, float),
        (True, Literal[1]),
        (1, bool),
        (1.0, int),
        ("1", int),
        (1, str),
        (None, int),
        ("c", Literal["a", "b"]),
        ("a", Sequence[str]),
        (b"a", Sequence[int]),
        ([1], Sequence[str]),
        ([True], Sequence[int]),
        (3, str | os.PathLike[str]),
        ("a", Callable[[], Any]),
        ({}, FromCode),
    ],
)
def test_a_value_does_not_fit(value: object, kind: Any) -> None:
    assert not fits(value, kind)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int | None, "a whole number, or none"),
        (Literal["full", "selective"] | None, "one of 'full', 'selective', or none"),
        (str | Sequence[str | type[FromCode]], "a text, or a list, each of whose items is a text"),
        (str | os.PathLike[str], "a text, or the path of a folder"),
        (float, "a number"),
    ],
)
def test_a_type_is_said_in_words(kind: Any, words: str) -> None:
    assert in_words(kind) == words
    assert in_words(kind, none=False) == words.removesuffix(", or none")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", float, 3),
        ("3", str, "3"),
        ("1e-3", float | None, 1e-3),
        ("True", bool, True),
        ("3.5", int, None),
        ("a", int, None),
        ("a", Literal["a"], "a"),
    ],
)
def test_a_text_stands_for_a_value(text: str, kind: Any, value: object) -> None:
    meant = meant_by(text, kind)
    assert meant == value
    assert type(meant) is type(value)


def test_types_that_are_not_imported_are_of_code() -> None:
    hints = hints_of(SwapAttentionConfig)
    assert hints["prefetch"] is int
    assert hints["swap_modules"] == str | Sequence[str | type[FromCode]] | None
    assert not is_code(hints["swap_modules"])
    assert is_code(FromCode | None)
    assert not hasattr(FromCode, "_private")


def test_lists_are_frozen() -> None:
    assert frozen([1, [2]]) == (1, (2,))
    assert frozen("ab") == "ab"
