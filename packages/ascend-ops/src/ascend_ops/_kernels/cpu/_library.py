"""kernels.c, compiled and loaded."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ascend_core import native
from ascend_core.errors import UnavailableError

__all__ = ["DTYPES", "IN_FP64", "Function"]

_SOURCE = Path(__file__).with_name("kernels.c")

# What kernels.c reads and writes, as it numbers them.
DTYPES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)
# Why a kernel refuses FP64.
IN_FP64 = "it computes in FP32."


class Function:
    """A function of kernels.c, which takes one structure.

    Args:
        name: Its name.

    Raises:
        UnavailableError: When kernels.c cannot be compiled here; see `ascend_core.native`.
    """

    def __init__(self, name: str) -> None:
        try:
            self._function = getattr(_library(), name)
        except AttributeError as error:
            raise UnavailableError(
                f"the library that was compiled from {_SOURCE.name} has no {name}.",
                why="the compiler ended well and left something else.",
                instead="remove it from the cache, or name another compiler in CC.",
            ) from error
        self._function.argtypes = (ctypes.c_void_p,)
        self._function.restype = None

    def __call__(self, structure: ctypes.Structure) -> None:
        """Compute what the structure says, with as many threads as it says."""
        self._function(ctypes.addressof(structure))


@functools.cache
def _library() -> ctypes.CDLL:
    return native.load(_SOURCE)
