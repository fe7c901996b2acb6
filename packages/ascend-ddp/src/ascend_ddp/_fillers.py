"""The streams on which gradients are accumulated into buckets, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ascend_core.device import backend_of
from ascend_core.streams import Stream
from ascend_ddp._bucket import Bucket
from ascend_ddp._round import Round

__all__ = ["Fillers"]


class Fillers:
    """The streams that have filled a bucket so far.

    Args:
        devices: On which there are buckets.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: list[Stream] = []
        self._planned_on: dict[torch.device, Stream] = {}

    def let_wait_for_plan(self) -> None:
        """Let no stream fill a bucket before the current one has made it."""
        self._planned_on = {d: backend_of(d).current_stream(d) for d in self._devices}
        for stream in self._streams:
            _let_wait(stream, self._planned_on[stream.device])

    def note(self, running: Round, number: int, bucket: Bucket) -> None:
        """Remember for whom a bucket waits: what the current stream has accumulated."""
        stream = bucket.backend.current_stream(bucket.device)
        filled_on = running.filled_on[number]
        if stream in filled_on:  # a list: streams are compared faster than hashed
            return
        filled_on.append(stream)
        if stream not in self._streams:
            self._streams.append(stream)
            _let_wait(stream, self._planned_on[bucket.device])

    def wait(self, running: Round, number: int, bucket: Bucket) -> None:
        """Make the current stream wait for those on which a bucket's gradients were accumulated."""
        current = bucket.backend.current_stream(bucket.device)
        for stream in running.filled_on[number]:
            _let_wait(current, stream)


def _let_wait(stream: Stream, other: Stream) -> None:
    if stream != other:
        stream.wait_stream(other)
