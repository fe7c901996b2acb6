"""The gradients of a window: views where they are, or slices brought from the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ascend_core.optim.arena import Arena, aligned
from ascend_core.optim.gradients import Gradients
from ascend_core.optim.home import CohortWindow, Slot
from ascend_core.optim.windows import Slice
from ascend_core.streams import Event

__all__ = ["Incoming"]

_BUFFERS = 2


class Incoming:
    """Gives each window the slices of its gradients.

    Those on the host come by turns into two buffers, one window ahead. A way in waits for what the
    current stream holds when it is queued, and by then that is all that reads its buffer. So do
    those that are still to be multiplied by something, which is done there: the gradient itself
    stays as it is, for a step that is interrupted.

    Args:
        source: Where the gradients come from.
        flat: By slot the whole gradient, on the device or the host.
        windows: The windows of the step.
    """

    def __init__(
        self, source: Gradients, flat: Mapping[Slot, torch.Tensor], windows: Sequence[CohortWindow]
    ) -> None:
        self._source = source
        self._flat = flat
        self._windows = windows
        self._arrived: dict[tuple[Slot, int], torch.Tensor] = {}
        self._way_in: dict[int, Event] = {}
        self._buffers: list[Arena] = []
        if source.transfer is not None:
            size = max(sum(aligned(part.nbytes) for _, _, part in self._moving(w)) for w in windows)
            device = source.transfer.device
            self._buffers = [Arena(size, device) for _ in range(min(_BUFFERS, len(windows)))]

    def fetch(self, number: int) -> None:
        """Start to bring what a window needs."""
        transfer = self._source.transfer
        if transfer is None:
            return
        buffer = self._buffers[number % len(self._buffers)]
        buffer.rewind()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        after: list[Event] = []
        for slot, piece, part in self._moving(self._windows[number]):
            target = buffer.take(part.numel(), part.dtype)
            self._arrived[slot, piece.number] = target
            pairs.append((target, part))
            after.extend(self._source.written(slot))
        if pairs:
            self._way_in[number] = transfer.bring(pairs, after=after)

    def blank(self, number: int) -> None:
        """Give a window memory that holds nothing yet instead. Asked only behind `fetch(0)`."""
        for buffer in self._buffers[-1:]:
            buffer.rewind()
        for slot, piece, part in self._moving(self._windows[number]):
            self._arrived[slot, piece.number] = self._buffers[-1].take(part.numel(), part.dtype)

    def enter(self, number: int) -> None:
        """Make the current stream wait for what a window needs."""
        if number in self._way_in:
            assert self._source.transfer is not None
            self._source.transfer.wait(self._way_in.pop(number))

    def slice(self, slot: Slot, piece: Slice) -> torch.Tensor:
        """A slice's gradient on the device: [piece.numel]."""
        if (slot, piece.number) in self._arrived:
            arrived = self._arrived.pop((slot, piece.number))
            for factor in self._source.factors(slot):
                arrived.mul_(factor)
            return arrived
        return self._flat[slot][piece.start : piece.stop]

    def close(self) -> None:
        """Give back the buffers, also half-way."""
        for buffer in self._buffers:
            assert self._source.transfer is not None
            self._source.transfer.tie(buffer.memory)
        self._buffers.clear()

    def _moving(self, window: CohortWindow) -> Iterator[tuple[Slot, Slice, torch.Tensor]]:
        for piece in window.slices:
            slot = window.slot(piece)
            flat = self._flat.get(slot)
            if flat is None:
                continue
            if flat.device != slot.parameter.device or self._source.factors(slot):
                yield slot, piece, flat[piece.start : piece.stop]
