"""The name that was likely meant. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["listed", "nearest"]


def nearest(
    name: str, known: Iterable[str], *, cutoff: float = 0.6, within: bool = True
) -> str | None:
    """The known name that is most like another, or that holds it, or None.

    Args:
        name: What was written.
        known: What could have been meant.
        cutoff: How alike they must be, from 0 to 1.
        within: Whether a known name may be meant that holds all words of what was written.
    """
    plain = {_plain(one): one for one in known}
    wanted = _plain(name)
    matches = difflib.get_close_matches(wanted, plain, n=1, cutoff=cutoff)
    if within:
        matches += [one for one in plain if f"_{wanted}_" in f"_{one}_"]
    return plain[matches[0]] if matches else None


def listed(names: Iterable[str]) -> str:
    """Names with commas between them, in order."""
    return ", ".join(sorted(names))


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")
