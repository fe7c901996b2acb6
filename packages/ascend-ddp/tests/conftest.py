"""What the tests of cases share: one start of the ranks runs all cases of a module."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ascend_core.testing import run_ranks


@pytest.fixture(scope="module", params=[2, 4])
def failed(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The tracebacks of the test module's `cases` that failed on a rank, on 2 and on 4 ranks."""
    run_cases = request.module.cases.run_cases
    found: dict[str, str] = {}
    for rank, ones in enumerate(run_ranks(run_cases, request.param, timeout_s=150)):
        for name, text in ones.items():
            found[name] = f"{found.get(name, '')}--- rank {rank}\n{text}"
    return found
