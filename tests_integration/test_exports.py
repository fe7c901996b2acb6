"""What a type checker sees in a package's `__init__` is what the package exports lazily."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

LAZY = ["ascend_core", "ascend_recompute"]


def names_for_type_checkers(source: str) -> dict[str, str]:
    """Read the names, and their modules, that the `if TYPE_CHECKING:` block imports."""
    [block] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("package", LAZY)
def test_both_lists_of_names_are_the_same(package: str) -> None:
    module = importlib.import_module(package)
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert names_for_type_checkers(source) == module._EXPORTS
