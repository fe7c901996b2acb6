"""A feature's page explains every message that its package can raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_core import errors

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "ascend-recompute": [
        "activation-recompute",
        "norm-recompute",
        "layer-recompute",
        "recompute-to-fit",
        "megatron",
    ]
}


def messages(package: str) -> Iterator[str]:
    """Yield, for each error that a package makes, the longest fixed part of what it says first."""
    for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in errors.__all__
            ):
                yield max(fixed_parts(node.args[0]), key=len).strip()


def fixed_parts(argument: ast.expr) -> list[str]:
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    return [str(part.value) for part in parts if isinstance(part, ast.Constant)]


@pytest.mark.parametrize("package", PAGES)
def test_every_message_is_explained(package: str) -> None:
    pages = [ROOT / "docs/features" / f"{name}.md" for name in PAGES[package]]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    found = list(messages(package))
    assert found
    assert [message for message in found if message not in text] == []
