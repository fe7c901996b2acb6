"""Which elements of a window need one bit more than weight and residual."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_core.device import backend_of
from ascend_reuse_param._bits import compact, expand

__all__ = ["Exceptions"]

_WORD = 4  # bytes: a bitmap is counted and listed by words of int32, four times as fast as by bytes
_LISTED_BYTES = 8  # for each word of the bitmap that is not 0: where it is, and what


class _Listed(NamedTuple):
    """The words of a bitmap that are not 0: int32 [count] each."""

    where: torch.Tensor
    value: torch.Tensor


class Exceptions:
    """The exceptions of a window: a bitmap, or a list of its words that are not 0.

    A step writes a bitmap. How many of its words are not 0 is counted on the device and copied to
    the host without a wait; once the number has arrived, and a list would be smaller, the list
    takes the bitmap's place. Nothing is decided before.

    Args:
        nbytes: Of the bitmap, which is rounded up to whole words.
        device: Where it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._words = -(-nbytes // _WORD)
        self._device = device
        pinned = device.type != "cpu"
        self._number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._arrival = backend_of(device).new_event()
        self._is_counted = False  # whether a number arrives, or has, that nobody looked at
        self._listed: _Listed | None = None
        self._bitmap: torch.Tensor | None = None  # int32 [words]: what counts, when it is there
        self._fresh: torch.Tensor | None = None  # the same: what a step is going to write

    @property
    def nbytes(self) -> int:
        """Bytes that are held on the device."""
        listed = self._listed
        held = [self._bitmap, *(listed or ())]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def is_bitmap(self) -> bool:
        """Whether a bitmap is held."""
        return self._bitmap is not None

    def prepare(self) -> None:
        """Allocate what `open` fills, unless there is a bitmap, which is then kept until `drop`."""
        if self._bitmap is not None:
            self._fresh = self._bitmap
        elif self._fresh is None:
            self._fresh = torch.empty(self._words, dtype=torch.int32, device=self._device)

    def open(self) -> torch.Tensor:
        """The bitmap, to be read and written: uint8, [nbytes]."""
        assert self._fresh is not None, "prepare() comes first"
        if self._fresh is not self._bitmap:
            if self._listed is None:
                self._fresh.zero_()
            else:
                expand(*self._listed, self._fresh)
        return self._fresh.view(torch.uint8)[: self._nbytes]

    def close(self) -> None:
        """Take what was written into the bitmap for the exceptions of now, and count them."""
        if self._fresh is not None:
            self._bitmap, self._fresh, self._listed = self._fresh, None, None
        if self._bitmap is not None:
            self._number.copy_(torch.count_nonzero(self._bitmap), non_blocking=True)
            self._arrival.record()
            self._is_counted = True

    def drop(self) -> None:
        """Forget a bitmap that was prepared and not closed."""
        self._fresh = None

    def tidy(self) -> None:
        """Let a list take the bitmap's place, if the number is known and there is memory for it."""
        if self._fresh is not None or not self._is_counted or not self._arrival.query():
            return
        self._is_counted = False
        count = int(self._number)
        if self._bitmap is None or count * _LISTED_BYTES >= self._words * _WORD:
            return
        try:
            self._listed = _Listed(*compact(self._bitmap, count)) if count else None
        except torch.OutOfMemoryError:
            return  # the bitmap is as good
        self._bitmap = None
