"""The repository's own checks find what they look for."""

from __future__ import annotations

import importlib.util
import sys
import types
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"_tools_{name}", ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


isolated = load("isolated")
sizes = load("sizes")

GOOD = ["ascend_x/__init__.py", "ascend_x/py.typed", "ascend_x-0.1.dist-info/licenses/LICENSE"]


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (GOOD, None),
        ([*GOOD, "tests/test_x.py"], "at its top"),
        ([*GOOD, "ascend_x/tests/helper.py"], "holds tests"),
        ([*GOOD, "ascend_x/conftest.py"], "holds tests"),
        (GOOD[:1] + GOOD[2:], "lacks py.typed"),
        (GOOD[:2], "lacks LICENSE"),
    ],
)
def test_wheel_is_checked(paths: list[str], problem: str | None, tmp_path: Path) -> None:
    wheel = tmp_path / "ascend_x-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in paths:
            archive.writestr(path, "")
    found = " ".join(isolated.wheel_problems(wheel))
    assert problem in found if problem else not found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import json, torch.nn", None),
        ("from . import sibling", None),
        ("from ascend_core.errors import ConfigError", None),
        ("import torch_npu", None),
        ("import numpy", "imports numpy"),
        ("from ascend_ops import swiglu", "imports ascend_ops"),
        ("def later():\n    import matplotlib.pyplot", "imports matplotlib"),
    ],
)
def test_undeclared_imports_are_found(line: str, problem: str | None, tmp_path: Path) -> None:
    source = tmp_path / "ascend_swap"
    source.mkdir()
    (source / "__init__.py").write_text(line)
    found = " ".join(isolated.import_problems(source, "ascend-swap"))
    assert problem in found if problem else not found


def test_siblings_are_followed() -> None:
    assert isolated.declared_siblings("ascend-core") == set()
    assert isolated.declared_siblings("ascend-swap") == {"ascend-core"}
    assert {"ascend-core", "ascend-recompute"} < isolated.declared_siblings("ascend-suite")


@pytest.mark.parametrize(("lines", "fails"), [(60, False), (61, True)])
def test_long_function_is_found(lines: int, fails: bool, tmp_path: Path) -> None:
    short = "".join(f"def short_{n}():\n    return {n}\n" for n in range(20))
    body = '    """Say what it does.\n\n    At some length.\n    """\n' + "    x = 1\n" * lines
    source = tmp_path / "module.py"
    source.write_text(f"{short}def long():\n{body}")
    assert bool(list(sizes.problems([source]))) == fails


def test_too_many_rather_long_functions_are_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("def rather_long():\n" + "    x = 1\n" * 41)
    assert "1 of 1 functions" in " ".join(sizes.problems([source]))
