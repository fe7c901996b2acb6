"""Sizes of memory as people write them: "64GiB", "1.5 TB". Imports no torch."""

from __future__ import annotations

import re

from ascend_core.errors import ConfigError

__all__ = ["parse_size", "size_text"]

_STEP = 1024
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_WRITTEN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B|bytes)?\s*$", re.IGNORECASE)
_POWERS = "KMGT"


def parse_size(text: str) -> int:
    """Read a number of bytes.

    `64GiB`, `64G` and `64Gi` are powers of 1024; `64GB` is 64 * 10**9, as on data sheets.

    Raises:
        ConfigError: When it is no size.
    """
    match = _WRITTEN.match(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no size.",
            why="it is a number and a unit, B, KiB, MiB, GiB or TiB (KB, MB, GB, TB for powers of "
            "1000).",
            instead="write 64GiB, for example.",
        )
    number, letter, binary = match.groups()
    if letter is None:
        return int(float(number))
    decimal = not binary and text.rstrip().lower().endswith("b")
    power = 1 + _POWERS.index(letter.upper())
    return int(float(number) * (1000 if decimal else _STEP) ** power)


def size_text(nbytes: int) -> str:
    """Write a number of bytes with three digits or so: `"1.50 GiB"`."""
    sign = "-" if nbytes < 0 else ""
    size = float(abs(nbytes))
    for unit in _UNITS:
        if size < _STEP or unit == _UNITS[-1]:
            break
        size /= _STEP
    if unit == "bytes":
        return f"{sign}{abs(nbytes)} bytes"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"
