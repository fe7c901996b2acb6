"""What all tests share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight: many tests collect and count."""
    gc.collect()
    gc.freeze()
