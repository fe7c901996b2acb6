"""Cutting tensors from one allocation, so that a step asks the allocator once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Arena", "aligned"]

_ALIGNMENT = 512  # bytes: allocators align so far, and kernels choose their path by alignment


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to how far an arena aligns."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """One block of device memory and how much of it is cut.

    Args:
        nbytes: Its size. Allocated at once, on the current stream.
        device: Where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Cut a tensor of shape [numel] with undefined content."""
        nbytes = numel * dtype.itemsize
        assert self._used + nbytes <= self.memory.numel(), "the arena was made too small"
        cut = self.memory.narrow(0, self._used, nbytes).view(dtype)
        self._used += aligned(nbytes)
        return cut

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Count what is taken inside as free again behind it."""
        mark = self.mark
        try:
            yield
        finally:
            self.rewind(mark)

    @property
    def mark(self) -> int:
        """How much is cut, for `rewind`."""
        return self._used

    def rewind(self, mark: int = 0) -> None:
        """Count as free again what was cut since a mark: everything, without one."""
        assert 0 <= mark <= self._used, "the mark is of another arena, or of before a rewind"
        self._used = mark
