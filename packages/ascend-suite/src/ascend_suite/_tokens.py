"""A command line as flags and what follows them. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

__all__ = ["flags_of"]


def flags_of(argv: Sequence[str] | str) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words behind it, up to the next one.

    Args:
        argv: The words, or a command line of them.
    """
    words = shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]
    flag: str | None = None
    following: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > len("--"):
            if flag is not None:
                yield flag, following
            flag, equals, value = word.partition("=")
            following = [value] if equals else []
        else:
            following.append(word)
    if flag is not None:
        yield flag, following
