"""Versions of software as they are written, and their order. Imports no torch.

[Note: why not `packaging`]
It is in most environments, and torch does not need it: nothing here may ask for it. What the rules
compare is the part that both PEP 440 and the vendors write alike: numbers, and the candidate before
a release, as in `2.13.0+cu128`, `0.16.0rc1` and `8.3.RC1`.
"""

from __future__ import annotations

import dataclasses
import re
from functools import total_ordering
from importlib import metadata

__all__ = ["OLDEST_CANN", "Version", "installed_version", "installed_versions"]

OLDEST_CANN = "8.5"
"""That of the table in torch_npu 2.13.0's description, for every PyTorch from 2.9 on."""

_DISTRIBUTIONS = {
    "torch_version": "torch",
    "torch_npu_version": "torch-npu",
    "megatron_core_version": "megatron-core",
    "transformer_engine_version": "transformer-engine",
}
_WRITTEN = re.compile(
    r"\s*v?(?P<numbers>\d+(?:\.\d+)*)(?:[.\-_]?(?P<stage>[a-z]+)[.\-_]?(?P<count>\d*))?",
    re.IGNORECASE,
)
# Before the release, and after it. Other letters (a git hash, a vendor's word) say nothing.
_STAGES = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "c": -1, "rc": -1, "post": 1}


@total_ordering
@dataclasses.dataclass(frozen=True)
class Version:
    """A version, in the order in which versions are released.

    Attributes:
        numbers: Those of the release, without zeros at the end: 2.13.0 and 2.13 are one version.
        stage: Below 0 for what comes before the release, above it for what comes after.
        count: Of the stage: 1 in "RC1".
    """

    numbers: tuple[int, ...]
    stage: int = 0
    count: int = 0

    @classmethod
    def of(cls, text: object) -> Version | None:
        """Read what is written; None where it is no version.

        What follows a `+` says how it was built, and does not count.
        """
        match = _WRITTEN.match(text.partition("+")[0]) if isinstance(text, str) else None
        if match is None:
            return None
        numbers = [int(number) for number in match["numbers"].split(".")]
        while numbers and not numbers[-1]:
            numbers.pop()
        stage = _STAGES.get((match["stage"] or "").lower(), 0)
        return cls(tuple(numbers), stage, int(match["count"] or 0) if stage else 0)

    @property
    def series(self) -> tuple[int, int]:
        """The first two numbers: what 2.13.0 and 2.13.1 have in common."""
        first, second, *_ = (*self.numbers, 0, 0)
        return first, second

    def __lt__(self, other: Version) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[tuple[int, ...], int, int]:
        return self.numbers, self.stage, self.count


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """The versions that a plan may name in its training, by the name of the option."""
    return {option: installed_version(name) for option, name in _DISTRIBUTIONS.items()}
