"""Makes the C allocator keep what is freed, as the caching allocators of accelerators do."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed memory to the system; elsewhere do nothing.

    By default glibc gives large blocks back and takes fresh pages for the next ones. A fresh page
    costs more than computing the values that go into it, and which variant of a benchmark meets
    how many of them depends on the order of its frees, not on its work. A training run on CPU does
    the same with `MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_MAX_=0` in its environment.

    Returns:
        Whether both settings took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
