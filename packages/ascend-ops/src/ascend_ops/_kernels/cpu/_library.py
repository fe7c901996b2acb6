"""kernels.c, compiled and loaded."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from ascend_core import native

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
        self._function = native.function_of(_library(), name, _SOURCE)
        self._function.argtypes = (ctypes.c_void_p,)
        self._function.restype = None

    def __call__(self, structure: ctypes.Structure) -> None:
        """Compute what the structure says, with as many threads as it says."""
        self._function(ctypes.addressof(structure))


@functools.cache
def _library() -> ctypes.CDLL:
    return native.load(_SOURCE)
