"""Public names that are imported when they are first read (PEP 562).

`import ascend_x` must import no torch. A package's `__init__` therefore holds a mapping from public
name to defining module, and takes its `__getattr__` and `__dir__` from here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package that exports lazily.

    Args:
        package: The package's `__name__`.
        exports: For each public name the module that defines it.

    Returns:
        The two functions. `__getattr__` imports the defining module and stores the value on the
        package, so that the next look-up is an ordinary one.
    """

    def resolve(name: str) -> object:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(exports[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return resolve, names
