"""What the tests of cases share: one start of the ranks runs all cases of a module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ascend_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from running_cases import run_cases


@pytest.fixture(scope="module", params=[2, 4])
def failed(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The tracebacks of the test module's `CASES` that failed on a rank, on 2 and on 4 ranks."""
    found: dict[str, str] = {}
    ranks = run_ranks(run_cases, request.param, request.module.CASES, timeout_s=500)
    for rank, ones in enumerate(ranks):
        for name, text in ones.items():
            found[name] = f"{found.get(name, '')}--- rank {rank}\n{text}"
    return found
