"""The package as a user imports it."""

from __future__ import annotations

import subprocess
import sys

import ascend_ddp


def test_import_loads_no_torch() -> None:
    code = "import sys, ascend_ddp; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there() -> None:
    for name in ascend_ddp.__all__:
        assert getattr(ascend_ddp, name) is not None
