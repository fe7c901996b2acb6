from __future__ import annotations

import subprocess
import sys

import ascend_sim


def test_importing_imports_no_torch() -> None:
    program = "import sys, ascend_sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_every_exported_name_exists_and_the_list_is_sorted() -> None:
    assert all(hasattr(ascend_sim, name) for name in ascend_sim.__all__)
    assert len(set(ascend_sim.__all__)) == len(ascend_sim.__all__)
