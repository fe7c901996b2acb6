"""What all tests share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from ascend_core.testing import available_devices


def pytest_collection_finish() -> None:
    """Take what the imports made out of the collector's sight: many tests collect and count."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=available_devices(), ids=str)
def default_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Run the test on each device: tensors and modules that say nothing else are made there.

    The package itself names a device in each of its calls, so the default hides nothing.
    """
    place = torch.device(request.param)
    with contextlib.nullcontext() if place.type == "cpu" else place:
        yield place
