"""The package as a user imports it."""

from __future__ import annotations

import subprocess
import sys

import ascend_swap


def test_import_loads_no_torch() -> None:
    code = "import sys, ascend_swap; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_is_exported_before_there_is_a_feature() -> None:
    assert ascend_swap.__all__ == ["__version__"]
