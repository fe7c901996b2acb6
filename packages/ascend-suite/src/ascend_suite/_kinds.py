"""What a value may be, by the annotation of its option. Imports no torch.

[Note: types that a file cannot give]
Configs name types of torch's in annotations that only a type checker reads. Such a name stands here
for `FromCode`: what it takes is an object of Python's, and no file can hold one.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "FromCode",
    "fits",
    "frozen",
    "hints_of",
    "in_words",
    "is_code",
    "meant_by",
    "words_of",
]


class _Anything(type):
    """A class whose attributes are itself: `nn.Module`, where there is no `nn`."""

    def __getattr__(cls, name: str) -> type[FromCode]:
        if name.startswith("_"):
            raise AttributeError(name)
        return FromCode


class FromCode(metaclass=_Anything):
    """What only Python code can give: a function, a type, an object of another library."""


class _Names(dict[str, Any]):
    """The names that an annotation may use; those that are not there are of code."""

    def __missing__(self, name: str) -> type[FromCode]:
        return FromCode


def hints_of(config: type[Any]) -> dict[str, Any]:
    """The types of a dataclass' fields, without importing what only type checkers import."""
    annotations: dict[str, Any] = {}
    for base in reversed(config.__mro__):
        module = sys.modules.get(base.__module__)
        names = _Names(vars(builtins) | (vars(module) if module is not None else {}))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            text = isinstance(annotation, str)
            annotations[name] = eval(annotation, {}, names) if text else annotation
    return {field.name: annotations[field.name] for field in dataclasses.fields(config)}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type. A truth value is no number, and an int is a float too."""
    arguments = typing.get_args(kind)
    match _shape(kind):
        case "any of":
            return any(fits(value, argument) for argument in arguments)
        case "word":
            return any(value is word or _same(value, word) for word in arguments)
        case "sequence":
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            return is_list and all(fits(item, arguments[0]) for item in value)
        case "path":
            return isinstance(value, str | os.PathLike)
        case "code":
            return callable(value) or not isinstance(value, str | int | float | list | dict | None)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def is_code(kind: Any) -> bool:
    """Whether all that the type admits, beside None, is what only code can give."""
    if _shape(kind) == "any of":
        return all(is_code(one) for one in typing.get_args(kind) if one is not types.NoneType)
    return _shape(kind) == "code"


def in_words(kind: Any, *, none: bool = True) -> str:
    """Say what a value may be: `a whole number, or none`.

    Args:
        kind: Its type.
        none: Whether to say that it may be none, where it may.
    """
    alternatives = dict.fromkeys(_alternatives(kind))
    if not none:
        alternatives.pop("none", None)
    return ", or ".join(alternatives)


def words_of(kind: Any) -> tuple[str, ...]:
    """The words that a type admits, where it lists them."""
    if _shape(kind) == "any of":
        return tuple(word for one in typing.get_args(kind) for word in words_of(one))
    return typing.get_args(kind) if _shape(kind) == "word" else ()


def meant_by(text: str, kind: Any) -> object | None:
    """The value of a type that a text stands for; None where it stands for none."""
    truth = {"true": True, "false": False}.get(text.lower())
    for value in (truth, _number(int, text), _number(float, text), text):
        if value is not None and fits(value, kind):
            return value
    return None


def frozen(value: object) -> object:
    """The value as a frozen config holds it: lists are tuples, and paths are texts."""
    if isinstance(value, tuple) and all(frozen(item) is item for item in value):
        return value
    if isinstance(value, list | tuple | range):
        return tuple(frozen(item) for item in value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "none",
}


def _shape(kind: Any) -> str:
    """How a type is made."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return "any of"
    if origin is typing.Literal:
        return "word"
    if origin in (collections.abc.Sequence, list, tuple):
        return "sequence"
    if origin is os.PathLike or kind is os.PathLike:
        return "path"
    if origin is not None or kind is FromCode or kind not in _WORDS:
        return "code"
    return "plain"


def _number(kind: type[int] | type[float], text: str) -> int | float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _same(value: object, word: object) -> bool:
    return type(value) is type(word) and value == word


def _alternatives(kind: Any) -> Iterator[str]:
    arguments = typing.get_args(kind)
    match _shape(kind):
        case "any of":
            # None last: it is the exception.
            for argument in sorted(arguments, key=lambda one: one is types.NoneType):
                yield from _alternatives(argument)
        case "word":
            yield "one of " + ", ".join(repr(word) for word in arguments)
        case "sequence":
            items = [one for one in _alternatives(arguments[0]) if one != "code"]
            yield "a list, each of whose items is " + " or ".join(items)
        case "path":
            yield "the path of a folder"
        case "code":
            yield "code"
        case _:
            yield _WORDS[kind]
