"""The codec in C, on a CPU: each array is read from memory once, and written once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ascend_core import native
from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import Parts, Rounding
from ascend_reuse_param._fingerprint import PLAIN, SIDE, WEIGHTED

__all__ = ["Library", "NativeCodec", "Split"]

_SOURCE = Path(__file__).with_name("split.c")
_Words = ctypes.c_uint64 * SIDE


class Split(ctypes.Structure):
    """`Split` of split.c: where the parts of a parameter are."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("bitmap", ctypes.c_void_p),
        ("fingerprints", ctypes.c_void_p),
        ("weighted", ctypes.c_void_p),
        ("plain", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    )


class Library:
    """split.c, compiled and loaded.

    Raises:
        UnavailableError: When it cannot be compiled here; see `ascend_core.native`.
    """

    def __init__(self) -> None:
        self.functions = native.load(_SOURCE)
        for name in ("ascend_split", "ascend_join"):
            function = native.function_of(self.functions, name, _SOURCE)
            function.argtypes = (ctypes.POINTER(Split), ctypes.c_void_p)
            function.restype = None
        self._weighted = _Words(*WEIGHTED)
        self._plain = _Words(*PLAIN)

    def describe(self, weight: torch.Tensor, parts: Parts) -> Split:
        """Say where a weight and its parts are, and how many threads torch would use."""
        tensors = (weight, parts.residual, parts.bitmap, parts.fingerprints)
        for tensor in tensors:
            assert tensor is None or (tensor.is_cpu and tensor.is_contiguous())
        return Split(
            weight.numel(),
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            ctypes.addressof(self._weighted),
            ctypes.addressof(self._plain),
            torch.get_num_threads(),
        )


class NativeCodec:
    """Splits and joins in one pass of C, with as many threads as torch has.

    Args:
        rounding: See `_bits`.
        library: What calls it.

    Raises:
        UnavailableError: When there is no compiler here; then `EagerCodec` does the same.

    Attributes:
        library: What calls it.
    """

    def __init__(
        self, rounding: Rounding = "nearest-even", *, library: Library | None = None
    ) -> None:
        self.rounding: Rounding = rounding
        self.library = library or Library()

    def scratch_bytes(self, numel: int) -> int:
        """Nothing: what is in between stays in registers."""
        return 0

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        assert (parts.bitmap is not None) == (self.rounding == "nearest-even")
        place = self.library.describe(weight, parts)
        self.library.functions.ascend_split(ctypes.byref(place), _address_of(master))

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        assert (parts.bitmap is not None) == (self.rounding == "nearest-even")
        place = self.library.describe(weight, parts)
        self.library.functions.ascend_join(ctypes.byref(place), _address_of(master))


def _address_of(master: torch.Tensor) -> int:
    """Where an FP32 master is, which C reads as such without another look."""
    assert master.is_cpu and master.is_contiguous() and master.dtype == torch.float32
    return master.data_ptr()
