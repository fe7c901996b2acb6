"""The package as a user imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ascend_recompute

pytestmark = pytest.mark.host


def test_import_loads_no_torch() -> None:
    code = "import sys, ascend_recompute; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert len(set(ascend_recompute.__all__)) == len(ascend_recompute.__all__)
    for name in ascend_recompute.__all__:
        assert getattr(ascend_recompute, name) is not None
        assert name in dir(ascend_recompute)
