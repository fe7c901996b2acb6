"""Each case of sharded_cases.py on two and on four gloo ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import sharded_cases as cases


@pytest.fixture(scope="module", params=[2, 4])
def failed(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The tracebacks of the cases that failed on a rank."""
    found: dict[str, str] = {}
    for rank, ones in enumerate(run_ranks(cases.run_cases, request.param, timeout_s=150)):
        for name, text in ones.items():
            found[name] = f"{found.get(name, '')}--- rank {rank}\n{text}"
    return found


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, failed: Mapping[str, str]) -> None:
    assert name not in failed, failed[name]
