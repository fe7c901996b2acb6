"""A feature's page explains every message that its code can raise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascend_core import errors

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "ascend-recompute/src": [
        "activation-recompute",
        "norm-recompute",
        "layer-recompute",
        "recompute-to-fit",
        "megatron",
    ],
    "ascend-swap/src": ["swap-optimizer", "swap-attention", "megatron"],
    "ascend-core/src/ascend_core/optim": ["swap-optimizer"],
    "ascend-reuse-param/src": ["reuse-fp32-param"],
    "ascend-ddp/src": ["reduce-gradients", "megatron"],
    "ascend-ops/src": ["fused-ops", "alibi", "megatron"],
}


def messages(folder: str) -> Iterator[str]:
    """Yield the longest fixed part of what each error in a folder's code says first."""
    for path in sorted((ROOT / "packages" / folder).rglob("*.py")):
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


@pytest.mark.parametrize("folder", PAGES)
def test_every_message_is_explained(folder: str) -> None:
    pages = [ROOT / "docs/features" / f"{name}.md" for name in PAGES[folder]]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    found = list(messages(folder))
    assert found
    assert [message for message in found if message not in text] == []
