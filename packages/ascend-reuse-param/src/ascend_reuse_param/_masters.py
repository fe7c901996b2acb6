"""The masters of a step, joined from weight and residual, and split again.

[Note: who holds which bits]
Between steps a master is nowhere. Its upper half, rounded, is the BF16 weight, which is the
model's; its lower half is the residual, 16 bits for each element; for the few elements whose upper
half does not follow from the two, there is an exception bit (see `Exceptions`). For each block of
4096 elements of a slice there is a fingerprint of the weight as it was split.

In its window a slice's master is joined into scratch memory, stepped there by torch, and split. A
kernel that steps in one pass never writes a master anywhere.

[Note: a weight that somebody else wrote]
There is no second copy of the upper half that could be compared with the weight, so the
fingerprint is: where it does not match, the block's weight was written by somebody else (a
checkpoint, an EMA, a broadcast, a flat buffer that it lies in), and its masters are the weights as
they are. That is decided on the device, while joining. A loaded master leaves the weight alone, and
the fingerprint of the weight that belongs to it: so weights and optimizer state may be loaded in
either order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ascend_core.optim import Arena, Cohort, CohortWindow, Held, Slice, Slot, aligned
from ascend_reuse_param._bits import BLOCK, Codec, Parts
from ascend_reuse_param._exceptions import Exceptions

__all__ = ["SplitMasters", "SplitWindow"]


class SplitWindow:
    """What is kept of the masters of a window, beside the weights.

    Args:
        window: The window.
        residuals: By slot, int16 [numel of the slot].
        device: Of the weights.
        keeps_exceptions: Whether the codec makes any.
    """

    def __init__(
        self,
        window: CohortWindow,
        residuals: dict[Slot, torch.Tensor],
        device: torch.device,
        *,
        keeps_exceptions: bool,
    ) -> None:
        self._residuals = residuals
        self._bits: dict[tuple[Slot, int], slice] = {}
        self._fingerprints: dict[tuple[Slot, int], torch.Tensor] = {}
        self.pieces = [piece for piece in window.slices if window.slot(piece).has_master]
        end = 0
        for piece in self.pieces:
            key = window.slot(piece), piece.number
            begin, end = end, end + -(-piece.numel // 8)
            self._bits[key] = slice(begin, end)
            self._fingerprints[key] = torch.empty(
                -(-piece.numel // BLOCK), dtype=torch.int64, device=device
            )
        self.exceptions = Exceptions(end, device) if keeps_exceptions and end else None
        self._bitmap: torch.Tensor | None = None

    @property
    def fingerprint_bytes(self) -> int:
        """Bytes of the fingerprints."""
        return sum(tensor.nbytes for tensor in self._fingerprints.values())

    def prepare(self) -> None:
        """Allocate what a step needs."""
        if self.exceptions is not None:
            self.exceptions.prepare()

    def open(self) -> None:
        """Have the exceptions as a bitmap."""
        if self.exceptions is not None:
            self._bitmap = self.exceptions.open()

    def close(self) -> None:
        """Take what was written. It may be written again, to the same bits, until `drop`."""
        if self.exceptions is not None:
            self.exceptions.close()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Prepare and open; drop what is not closed inside."""
        self.prepare()
        try:
            self.open()
            yield
        finally:
            self.drop()

    def tidy(self) -> None:
        """Let a list take the bitmap's place, if that can be decided by now."""
        if self.exceptions is not None:
            self.exceptions.tidy()

    def drop(self) -> None:
        """Forget what was prepared and not closed."""
        self._bitmap = None
        if self.exceptions is not None:
            self.exceptions.drop()

    def parts(self, slot: Slot, piece: Slice) -> Parts:
        """What is kept of one slice; only between `open` and `close`."""
        key = slot, piece.number
        bitmap = None if self._bitmap is None else self._bitmap[self._bits[key]]
        residual = self._residuals[slot][piece.start : piece.stop]
        return Parts(residual, bitmap, self._fingerprints[key])


class SplitMasters:
    """Masters that live in the bits of their weights; see `ascend_core.optim.Masters`.

    Args:
        codec: Splits and joins.
        device: Of the weights.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._codec = codec
        self._device = device
        self._residuals: dict[Slot, torch.Tensor] = {}
        self._windows: dict[CohortWindow, SplitWindow] = {}
        self._places: dict[tuple[Slot, int], tuple[Slice, SplitWindow]] = {}

    def admit(self, cohort: Cohort) -> None:
        """Take in new slots. Their masters are their weights."""
        residuals = {
            slot: torch.empty(slot.parameter.numel(), dtype=torch.int16, device=self._device)
            for slot in cohort.slots
            if slot.has_master
        }
        codec_keeps = self._codec.rounding == "nearest-even"
        windows = {
            window: SplitWindow(window, residuals, self._device, keeps_exceptions=codec_keeps)
            for window in cohort.windows
        }
        self._residuals.update(residuals)
        self._windows.update(windows)
        for window, split in windows.items():
            for piece in split.pieces:
                self._places[window.slot(piece), piece.number] = piece, split
        try:
            for slot in residuals:
                self.load(slot, None)
        except BaseException:
            self.dismiss(cohort)
            raise

    def dismiss(self, cohort: Cohort) -> None:
        """Drop what is kept for a cohort."""
        for window in cohort.windows:
            for piece in self._windows.pop(window).pieces:
                del self._places[window.slot(piece), piece.number]
        for slot in cohort.slots:
            self._residuals.pop(slot, None)

    def window(self, window: CohortWindow) -> SplitWindow:
        """What is kept of a window."""
        return self._windows[window]

    def parts(self, held: Held) -> Parts:
        """What is kept of a slice whose window is open."""
        _, split = self._places[held.slot, held.piece.number]
        return split.parts(held.slot, held.piece)

    def kept_bytes(self, numel: int) -> int:
        """See `Masters.kept_bytes`."""
        return 4 * numel

    def opening_bytes(self, slot: Slot, numel: int) -> int:
        """See `Masters.opening_bytes`."""
        return self._codec.scratch_bytes(numel)

    def writing_bytes(self, slot: Slot, numel: int) -> int:
        """See `Masters.writing_bytes`."""
        return self._codec.scratch_bytes(numel)

    def open(self, held: Held, weight: torch.Tensor, scratch: Arena) -> torch.Tensor:
        """Join a master."""
        master = scratch.take(weight.numel(), torch.float32)
        with scratch.passing():
            self._codec.join(weight, self.parts(held), master, scratch)
        return master

    def write(self, held: Held, weight: torch.Tensor, master: torch.Tensor, scratch: Arena) -> None:
        """Split a master."""
        with scratch.passing():
            self._codec.split(master, weight, self.parts(held), scratch)

    def read(self, slot: Slot) -> torch.Tensor:
        """Join the whole master on the host, slice by slice. What is returned is a copy."""
        flat = slot.flat()
        whole = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
        scratch = self._scratch(slot, torch.float32)
        for piece, split in self._slices(slot):
            with split.opened(), scratch.passing():
                master = scratch.take(piece.numel, torch.float32)
                weight = flat[piece.start : piece.stop]
                self._codec.join(weight, split.parts(slot, piece), master, scratch)
                whole[piece.start : piece.stop].copy_(master)
        return whole

    def load(self, slot: Slot, master: torch.Tensor | None) -> None:
        """Split a whole master slice by slice. The weight itself is left as it is."""
        flat = slot.flat() if master is None else _flattened(master, slot)
        scratch = self._scratch(slot, torch.float32, torch.bfloat16)
        for piece, split in self._slices(slot):
            with split.opened(), scratch.passing():
                wide = scratch.take(piece.numel, torch.float32)
                weight = scratch.take(piece.numel, torch.bfloat16)
                wide.copy_(flat[piece.start : piece.stop])
                self._codec.split(wide, weight, split.parts(slot, piece), scratch)
                split.close()
        for _, split in self._slices(slot):
            split.tidy()

    def tidy(self) -> None:
        """Let lists take the place of bitmaps where that can be decided by now."""
        for split in self._windows.values():
            split.tidy()

    def report(self) -> dict[str, int]:
        """Bytes on the device beside weights and moments, and how exceptions are kept."""
        self.tidy()
        windows = self._windows.values()
        exceptions = [w.exceptions for w in windows if w.exceptions is not None]
        return {
            "residual_bytes": sum(tensor.nbytes for tensor in self._residuals.values()),
            "fingerprint_bytes": sum(window.fingerprint_bytes for window in windows),
            "exception_bytes": sum(kept.nbytes for kept in exceptions),
            "windows_with_a_bitmap": sum(kept.is_bitmap for kept in exceptions),
        }

    def _slices(self, slot: Slot) -> list[tuple[Slice, SplitWindow]]:
        return [self._places[slot, number] for number in range(slot.slices)]

    def _scratch(self, slot: Slot, *dtypes: torch.dtype) -> Arena:
        """Memory for a slice in each of these dtypes, and for what the codec needs."""
        numel = max(piece.numel for piece, _ in self._slices(slot))
        kept = sum(aligned(dtype.itemsize * numel) for dtype in dtypes)
        return Arena(kept + self._codec.scratch_bytes(numel), slot.parameter.device)


def _flattened(master: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A master as its parameter lies in memory: FP32, [numel]."""
    flat = torch.empty(slot.parameter.numel(), dtype=torch.float32, device=master.device)
    slot.shaped(flat).copy_(master)
    return flat
