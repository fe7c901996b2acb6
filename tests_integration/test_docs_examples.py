"""Every python block of the documentation runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATTERNS = ["README.md", "packages/*/README.md", "docs/*.md", "docs/features/*.md"]


def python_blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def pages() -> list[str]:
    found = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
    return [str(page.relative_to(ROOT)) for page in found if python_blocks(page)]


def test_readme_and_quickstart_show_code() -> None:
    assert {"README.md", "docs/quickstart.md"} <= set(pages())


@pytest.mark.parametrize("page", pages())
def test_python_blocks_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    program = "\n".join(python_blocks(ROOT / page))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
