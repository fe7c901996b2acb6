"""The streams on which gradients are accumulated into buckets, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ascend_core.device import backend_of
from ascend_core.streams import Stream
from ascend_ddp._round import Round

__all__ = ["Fillers"]


class Fillers:
    """The streams that have filled a bucket so far.

    Args:
        devices: On which there are buckets.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: dict[Any, Stream] = {}
        self._planned_on: dict[torch.device, Stream] = {}

    def let_wait_for_plan(self) -> None:
        """Let no stream fill a bucket before the current one has made it."""
        self._planned_on = {d: backend_of(d).current_stream(d) for d in self._devices}
        for stream in self._streams.values():
            _let_wait(stream, self._planned_on[stream.device])

    def note(self, running: Round, number: int, flat: Tensor) -> None:
        """Remember for whom a bucket waits: what the current stream has accumulated."""
        stream = backend_of(flat).current_stream(flat.device)  # that of a tensor is known soonest
        running.filled_on.setdefault(number, {})[stream] = stream
        if stream not in self._streams:
            self._streams[stream] = stream
            _let_wait(stream, self._planned_on[flat.device])

    def wait(self, running: Round, number: int, flat: Tensor) -> None:
        """Make the current stream wait for those on which a bucket's gradients were accumulated."""
        current = backend_of(flat).current_stream(flat.device)
        for stream in running.filled_on.get(number, {}).values():
            _let_wait(current, stream)


def _let_wait(stream: Stream, other: Stream) -> None:
    if stream != other:
        stream.wait_stream(other)
