"""What the simulated runtime has done so far."""

from __future__ import annotations

import dataclasses

# Totals grow and have a difference; these are levels.
_LEVELS = {"tasks_pending", "device_bytes", "pinned_bytes"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """A snapshot of the runtime's counters, all devices together.

    The difference of two snapshots is what happened in between; levels (tasks pending, bytes held)
    are those of the later one.

    Attributes:
        h2d_bytes: Bytes copied from host to device.
        d2h_bytes: Bytes copied from device to host.
        d2d_bytes: Bytes copied by the runtime within and between devices. `Tensor.copy_` between
            device tensors is a kernel, and not here.
        h2d_copies: How many copies that were.
        d2h_copies: The same from device to host.
        d2d_copies: The same within and between devices.
        synchronisations: Calls in which the host waited for a stream, an event or a device; a copy
            from or to pageable host memory is one.
        event_queries: How often an event was asked whether it is reached, the caching allocators'
            questions included.
        kernels: Kernels submitted.
        device_allocations: Requests to torch_npu's caching allocator.
        pinned_allocations: Requests to its caching allocator of pinned host memory.
        device_segments: Requests of those allocators to the runtime, failed ones included.
        pinned_segments: The same for pinned host memory.
        tasks_submitted: Kernels, copies, records and waits given to a stream.
        tasks_pending: Those that have not run yet.
        device_bytes: Bytes that the allocators hold of all devices' memory.
        pinned_bytes: Bytes of pinned host memory that they hold; registered memory is not counted.
        faults_injected: Faults that struck.
    """

    h2d_bytes: int
    d2h_bytes: int
    d2d_bytes: int
    h2d_copies: int
    d2h_copies: int
    d2d_copies: int
    synchronisations: int
    event_queries: int
    kernels: int
    device_allocations: int
    pinned_allocations: int
    device_segments: int
    pinned_segments: int
    tasks_submitted: int
    tasks_pending: int
    device_bytes: int
    pinned_bytes: int
    faults_injected: int

    def __sub__(self, earlier: Counters) -> Counters:
        """What happened since `earlier`."""
        later = dataclasses.asdict(self)
        before = dataclasses.asdict(earlier)
        return Counters(
            **{
                name: value if name in _LEVELS else value - before[name]
                for name, value in later.items()
            }
        )
