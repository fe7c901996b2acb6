"""Each case of cases.py on two and on four gloo ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cases_joined  # noqa: F401  registers more
import cases_of_buffers  # noqa: F401  registers more
import cases_of_misuse  # noqa: F401  registers more
import cases_of_segments  # noqa: F401  registers more
import cases_of_use  # noqa: F401  registers more
from cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, failed: Mapping[str, str]) -> None:
    assert name not in failed, failed[name]
