"""What the docstring of a dataclass says of its fields. Imports no torch."""

from __future__ import annotations

import inspect
import re
from typing import Any

__all__ = ["described_fields"]

_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def described_fields(config: type[Any]) -> dict[str, str]:
    """Read the `Attributes:` section of a class: for each field what it means, on one line."""
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("\nAttributes:\n")
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
