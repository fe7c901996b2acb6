"""Asynchronous copies between a device and the host: one tensor, one copy, one event.

[Note: the life of a tensor that waits on the host]
* `engine.to_host(x)` queues the copy on the engine's outward stream, behind what the caller's
  current stream holds at that moment and behind the last copy that used the host memory. It
  returns at once. `x` stays the caller's: when the caller drops it, `record_stream` keeps its block
  from reuse until the copy has ended.
* The `HostCopy` owns a buffer of the pinned pool. The copy's event is the buffer's last use.
* `host.fetch()` allocates the target on the caller's current stream and queues the copy back on
  the inward stream: behind what the current stream holds (the block may have been somebody's a
  moment ago) and behind the buffer's last use, which is its own way out or an earlier way back.
  No path skips that wait. It returns at once; fetching early is all that a prefetch is.
* `device_copy.wait()` makes the stream that is current *then* wait for the copy, and returns the
  tensor. If that is not the stream that allocated the block, `record_stream` ties the block to it
  too. A copy that is dropped without a wait ties its block to the inward stream instead.
* `host.release()`, or the death of the `HostCopy`, returns the buffer to the pool, together with
  the event of the last copy that used it.

So the rule for host memory is one: each copy waits for the last copy that used the same buffer, and
then takes its place. The host blocks nowhere but in `HostCopy.on_host`.

On the CPU all of this runs inline: the host copy is a real copy in the pool's memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from ascend_core.device import Backend, backend_of, device_of
from ascend_core.errors import ConfigError, HostMemoryError
from ascend_core.layout import Layout
from ascend_core.pinned import HostBuffer, PinnedPool
from ascend_core.streams import Event, Stream

__all__ = ["DeviceCopy", "HostCopy", "Transfer"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

# In bytes. Kernels choose their path by how a pointer is aligned; allocators align blocks so far.
_POINTER_ALIGNMENT = 512


class Transfer:
    """Moves tensors of one device to the host and back.

    It has two streams of its own, one for each direction, made when they are first needed. It may
    be used by several threads.

    Args:
        device: The device, or a tensor or module that is on it.
        pool: The host memory; a pool of the engine's own, without a budget, when left out.
        backend: The device's backend, when it is not the one that `backend_of` finds.
        timing: Whether the events of `to_host` and `to_device` keep times.
    """

    def __init__(
        self,
        device: torch.Tensor | nn.Module | torch.device | str,
        *,
        pool: PinnedPool | None = None,
        backend: Backend | None = None,
        timing: bool = False,
    ) -> None:
        self.device = device_of(device)
        self.pool = PinnedPool() if pool is None else pool
        self._backend = backend_of(self.device) if backend is None else backend
        self._timing = timing
        self._lock = threading.Lock()
        self._streams: tuple[Stream, Stream] | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `to_host` can move the tensor: it is on this device, strided and plain."""
        return tensor.device == self.device and Layout.fits(tensor)

    def to_host(self, tensor: torch.Tensor, *, whole_storage: bool = False) -> HostCopy:
        """Start copying a tensor to the host. Does not block the host, and does not free anything.

        What is copied is the range of the storage that the tensor covers: an expanded dimension
        once, gaps between strided elements as they are. Nothing is gathered or cloned before.

        Args:
            tensor: Any plain strided tensor of this device. It may be dropped at once, but not
                written to before the copy has ended: see `HostCopy.last_use`.
            whole_storage: Copy all of the tensor's storage, so that every view of it can be had
                from the one copy, each with its own offset (see `DeviceCopy.wait`).

        Raises:
            ConfigError: When the tensor is on another device or not plain; see `takes`.
            BudgetExceededError: When the pool's budget does not allow it. Nothing has moved.
            HostMemoryError: When the host has no memory for it. Nothing has moved.
        """
        if tensor.device != self.device:
            raise ConfigError(
                f"a tensor on {tensor.device} was given to the transfer engine of {self.device}.",
                instead="use an engine of the tensor's own device, or leave the tensor alone.",
            )
        layout = Layout.of(tensor)
        source = layout.flatten(tensor, whole_storage=whole_storage)
        first = 0 if whole_storage else layout.offset * source.itemsize
        buffer = self.pool.allocate(source.numel() * source.itemsize)
        outward, _ = self._both_streams()
        self._queue(buffer.tensor.view(layout.dtype), source, buffer, outward)
        self._backend.record_stream(source, outward)
        return HostCopy(self, layout, first, buffer)

    def to_device(
        self,
        host: HostCopy,
        *,
        out: torch.Tensor | None = None,
        after: Sequence[Event] = (),
    ) -> DeviceCopy:
        """Start copying a host copy to this engine's device. Does not block the host.

        When this raises, the host copy is as it was and can be fetched again. Errors of the device
        are torch's own, with a note on what was being moved.

        Args:
            host: What `to_host` returned. It may be fetched any number of times.
            out: Where to copy to, instead of memory of its own: a tensor of this device that
                covers as many elements, of the same dtype. Its own layout does not matter.
            after: Further events that the copy must wait for; with `out`, the copies that last
                read it on another stream.

        Raises:
            ConfigError: When `out` does not fit.
            HostMemoryError: When the host copy was released.
        """
        buffer = host._buffer
        source = host.stored()
        if out is None:
            # The new block begins a little earlier, so that pointers stay aligned as they were.
            lead = host._first % _POINTER_ALIGNMENT // source.itemsize
            stored = self._room(lead + source.numel(), source)
        else:
            lead = 0
            stored = self._checked(out, source)
        _, inward = self._both_streams()
        try:
            done = self._queue(stored[lead:], source, buffer, inward, after)
        except BaseException:  # the copy may have been queued all the same
            self._backend.record_stream(stored, inward)
            raise
        first = host._first - lead * source.itemsize
        return DeviceCopy(host.layout, stored, first, done, (self._backend, self.device, inward))

    def _room(self, count: int, like: torch.Tensor) -> torch.Tensor:
        try:
            return like.new_empty(count, device=self.device)
        except RuntimeError as error:
            error.add_note(
                f"{self.device} has no {count * like.itemsize} bytes for values that come back "
                "from the host. They are still there."
            )
            raise

    def _checked(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        layout = Layout.of(out)
        if (out.device, out.dtype, layout.span) != (self.device, source.dtype, source.numel()):
            raise ConfigError(
                f"a host copy of {source.numel()} elements of {source.dtype} does not fit a tensor "
                f"that covers {layout.span} of {out.dtype} on {out.device}.",
                instead=f"pass one of the same number and dtype on {self.device}.",
            )
        return layout.flatten(out)

    def bring(self, pairs: Pairs, *, after: Sequence[Event] = ()) -> Event:
        """Queue copies of host memory that the caller owns to the device. Does not block the host.

        They run on the inward stream, behind what the current stream holds and behind `after`. The
        caller sees to it that neither side is written or given away before they have ended.

        Args:
            pairs: Target and source of each copy, of the same shape and dtype.
            after: The copies that last wrote or read any of this memory on another stream.

        Returns:
            An event behind the last copy.
        """
        done = self._backend.new_event()
        self._queue_all(pairs, self._both_streams()[1], after, done)
        return done

    def send(self, pairs: Pairs, *, after: Sequence[Event] = ()) -> Event:
        """Queue copies to host memory that the caller owns. As `bring`, on the outward stream."""
        done = self._backend.new_event()
        self._queue_all(pairs, self._both_streams()[0], after, done)
        return done

    def tie(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's block, once freed, from reuse until both streams are past this point.

        For device memory that `bring` or `send` may still use when nobody waits for them.
        """
        for stream in self._both_streams():
            self._backend.record_stream(tensor, stream)

    def finish_sends(self) -> None:
        """Block the host until every copy to the host that was queued has ended.

        Those of a `send` that raised are among them, for which there is no event.
        """
        if self._streams is not None:
            self._streams[0].synchronize()

    def mark(self) -> Event:
        """Return an event that keeps its time, behind what the current stream holds now."""
        event = self._backend.new_event(timing=True)
        event.record(self._backend.current_stream(self.device))
        return event

    def wait(self, event: Event) -> None:
        """Make the current stream wait for copies that were queued. The host goes on."""
        self._backend.current_stream(self.device).wait_event(event)

    def _queue_all(self, pairs: Pairs, stream: Stream, after: Sequence[Event], done: Event) -> None:
        """Queue copies on `stream`, and record `done` behind them."""
        stream.wait_stream(self._backend.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        try:
            with self._backend.stream_context(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        finally:  # a copy that raised may have been queued all the same
            done.record(stream)

    def _queue(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        buffer: HostBuffer,
        stream: Stream,
        after: Sequence[Event] = (),
    ) -> Event:
        """Queue one copy on `stream`; all that it needs has been allocated."""
        done = self._backend.new_event(timing=self._timing)
        with buffer.lock:
            try:
                self._queue_all([(target, source)], stream, (*buffer.last_use, *after), done)
            except RuntimeError as error:
                error.add_note(
                    f"{source.nbytes} bytes were being copied from {source.device} to "
                    f"{target.device}, and the device did not take the copy."
                )
                raise
            finally:
                buffer.used_by(done)
        return done

    def _both_streams(self) -> tuple[Stream, Stream]:
        """Return the outward and the inward stream, made at the first call."""
        with self._lock:
            if self._streams is None:
                new_stream = self._backend.new_stream
                self._streams = new_stream(self.device), new_stream(self.device)
            return self._streams


class HostCopy:
    """A tensor's values on the host, or on their way there. Owns its host memory.

    Attributes:
        layout: The layout of the tensor that was copied.
    """

    def __init__(self, engine: Transfer, layout: Layout, first: int, buffer: HostBuffer) -> None:
        self.layout = layout
        self._engine = engine
        self._first = first  # the byte of the old storage that the buffer begins with
        self._buffer = buffer

    @property
    def engine(self) -> Transfer:
        """What copied it, and copies it back."""
        return self._engine

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self._buffer.tensor.numel()

    @property
    def last_use(self) -> tuple[Event, ...]:
        """The last copy that was queued from or to this host memory."""
        return self._buffer.last_use

    def fetch(self) -> DeviceCopy:
        """Start copying back to the device it came from; see `Transfer.to_device`."""
        return self._engine.to_device(self)

    def on_host(self) -> torch.Tensor:
        """Return the tensor in host memory, without a copy. Blocks the host until it is there.

        Returns:
            A CPU tensor of the same shape, stride and dtype, valid until this copy is released.

        Raises:
            HostMemoryError: When the copy was released.
        """
        stored = self.stored()
        self._buffer.wait()
        return self.layout.rebuild(stored, self._first)

    def release(self) -> None:
        """Give the host memory back to the pool. Copies under way go on unharmed."""
        self._buffer.release()

    def stored(self) -> torch.Tensor:
        """The host memory as it was copied, without waiting for `last_use`.

        Returns:
            A view of shape [n] and of the tensor's dtype, in the order of its memory.

        Raises:
            HostMemoryError: When the copy was released.
        """
        if self._buffer.is_released:
            raise HostMemoryError(
                "the host copy was released, so its values are gone.",
                instead="fetch or read it before it is released.",
            )
        return self._buffer.tensor.view(self.layout.dtype)


class DeviceCopy:
    """A tensor's values on their way back to the device.

    Attributes:
        layout: The layout of the tensor that was copied to the host.
    """

    def __init__(
        self,
        layout: Layout,
        stored: torch.Tensor,
        first: int,
        done: Event,
        route: tuple[Backend, torch.device, Stream],
    ) -> None:
        self.layout = layout
        self._stored = stored
        self._first = first
        self._done = done
        self._backend, self._device, inward = route
        self._owner = self._backend.current_stream(self._device)
        # The block is the owner's: if nobody makes it wait, the allocator must.
        self._dropped = weakref.finalize(self, self._backend.record_stream, stored, inward)
        self._dropped.atexit = False

    @property
    def done(self) -> Event:
        """The end of the copy."""
        return self._done

    def is_there(self) -> bool:
        """Whether the copy has ended. Does not block the host."""
        return self._done.query()

    def wait(self, layout: Layout | None = None) -> torch.Tensor:
        """Make the current stream wait for the copy, and return the tensor. The host goes on.

        The current stream is read at each call. Every call returns a view of the same memory.

        Args:
            layout: Another view of the storage, when all of it was copied; the layout of the tensor
                that was copied when left out.

        Returns:
            A detached tensor of the layout's shape, stride and dtype. Its storage offset is the
            layout's own when the whole storage was copied; otherwise the storage holds only what
            the tensor covers, and the offset is smaller by a multiple of 512 bytes, so that
            pointers are aligned as they were.
        """
        stream = self._backend.current_stream(self._device)
        stream.wait_event(self._done)
        if stream != self._owner:
            self._backend.record_stream(self._stored, stream)
        self._dropped.detach()
        return (layout or self.layout).rebuild(self._stored, self._first)
