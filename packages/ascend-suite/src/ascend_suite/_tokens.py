"""A command line as flags and what follows them. Imports no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

__all__ = ["attribute_of", "flags_of"]

_FLAG = re.compile(r"--.|-[A-Za-z]", re.DOTALL)
_CONTINUED = re.compile(r"\\\r?\n")


def flags_of(argv: Sequence[str] | str) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words behind it, up to the next one; first "" with those before any.

    Args:
        argv: The words, or a command line of them. A flag of one dash is one, and a negative number
            is none.

    Raises:
        ValueError: When a quotation of a command line is not closed.
    """
    words = _words(argv) if isinstance(argv, str) else [str(word) for word in argv]
    flag = ""
    following: list[str] = []
    for word in words:
        if _FLAG.match(word):
            yield flag, following
            flag, equals, value = word.partition("=")
            following = [value] if equals else []
        else:
            following.append(word)
    yield flag, following


def attribute_of(flag: str) -> str:
    """The name under which `argparse` has what a flag gives."""
    return flag.lstrip("-").replace("-", "_")


def _words(line: str) -> list[str]:
    """The words of a command line; what goes on behind a backslash is one line, as in a shell."""
    return shlex.split(_CONTINUED.sub("", line))
