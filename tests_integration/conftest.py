"""What the tests of several features share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests_integration.megatron_cpu import megatron_on_cpu


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """Real megatron-core on the CPU, on one thread: so small are the tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with megatron_on_cpu():
        yield
    torch.set_num_threads(threads)
