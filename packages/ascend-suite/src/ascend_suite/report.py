"""What the features of a session did: a table, and the same as plain numbers. Imports no torch."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["FeatureReport", "SessionReport"]

_MIB = 2**20
_HEADINGS = ("feature", "bytes", "time", "notes")
_WIDTHS = (22, 36, 24, 60)
_SCALES = {"_ms": 1e-3, "_s": 1.0, "_seconds": 1.0}


@dataclasses.dataclass(frozen=True)
class FeatureReport:
    """A row: what one feature did.

    Attributes:
        feature: Its name.
        bytes: Byte counts, by the name that the feature gives them.
        seconds: Times, by name; `turning_on` is what `apply` took for it.
        notes: What else there is to say: counts, and what the check of the plan said of it.
        values: Everything that the feature reports.
    """

    feature: str
    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    values: Mapping[str, Any]

    @classmethod
    def of(
        cls, feature: str, values: Mapping[str, Any], turning_on: float, notes: Sequence[str] = ()
    ) -> FeatureReport:
        """Sort what a handle reports into bytes, times and the rest.

        Args:
            feature: The name of its feature.
            values: What it reports: bytes end in `_bytes`, or have that inside; times end in `_ms`
                or `_seconds`. What is neither, and no mapping, is a note.
            turning_on: Seconds.
            notes: Shown before the others.
        """
        sizes: dict[str, int] = {}
        seconds = {"turning_on": turning_on}
        others: list[str] = list(notes)
        for key, value in values.items():
            unit = next((unit for unit in _SCALES if key.endswith(unit)), None)
            if _is_number(value) and "_bytes" in key:
                sizes[key] = int(value)
            elif _is_number(value) and unit is not None:
                seconds[key.removesuffix(unit)] = value * _SCALES[unit]
            elif isinstance(value, (list, tuple)) and value:
                others.append(f"{key}: {len(value)}")
            elif isinstance(value, (str, int, float)):
                others.append(f"{key}: {value}")
        return cls(feature, sizes, seconds, tuple(others), dict(values))

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        fields = dataclasses.asdict(dataclasses.replace(self, values={}))
        return {**fields, "values": _json_value(self.values)}


@dataclasses.dataclass(frozen=True)
class SessionReport:
    """The table. `str()` of it is for people.

    Attributes:
        features: A row for each feature, in the order in which they were turned on.
        remarks: What the check of the plan said beside, of no feature that is on.
    """

    features: tuple[FeatureReport, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.features:
            return "\n".join(("no feature is on", *self.remarks))
        lines = [_line([(heading,) for heading in _HEADINGS], number=0)]
        lines.append("  ".join("-" * width for width in _WIDTHS))
        for row in self.features:
            cells = _cells(row)
            lines += [_line(cells, number) for number in range(max(map(len, cells)))]
        return "\n".join((*lines, *self.remarks))

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "features": [row.as_json() for row in self.features],
            "remarks": list(self.remarks),
        }

    def metrics(self) -> dict[str, int | float]:
        """The numbers alone, flat, for loggers: `"ascend/swap-optimizer/host_state_bytes"`."""
        found: dict[str, int | float] = {}
        for row in self.features:
            found[f"ascend/{row.feature}/turning_on_seconds"] = row.seconds["turning_on"]
            for key, value in row.values.items():
                if _is_number(value):
                    found[f"ascend/{row.feature}/{key}"] = value
        return found


def _cells(row: FeatureReport) -> list[Sequence[str]]:
    """The lines of each cell."""
    sizes = [f"{_words(name)} {_size(n)}" for name, n in row.bytes.items()]
    times = [f"{_words(name)} {seconds * 1e3:.1f} ms" for name, seconds in row.seconds.items()]
    notes = [line for note in row.notes for line in textwrap.wrap(_words(note), _WIDTHS[-1])]
    return [(row.feature,), sizes, times, notes]


def _words(name: str) -> str:
    """As people read it: "host state" of "host_state_bytes"."""
    return name.replace("_bytes", "").replace("_", " ")


def _size(count: int) -> str:
    return f"{count / _MIB:.1f} MiB" if abs(count) >= _MIB // 10 else f"{count} B"


def _line(cells: Sequence[Sequence[str]], number: int) -> str:
    parts = (cell[number] if number < len(cell) else "" for cell in cells)
    return "  ".join(part.ljust(width) for part, width in zip(parts, _WIDTHS, strict=True)).rstrip()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _json_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
