"""What cuda and npu share: all that torch.accelerator, torch.Stream and torch.Event offer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import torch

from ascend_core.errors import DeviceUnavailableError
from ascend_core.streams import Event, Stream

__all__ = ["AcceleratorBackend"]


@dataclasses.dataclass(frozen=True)
class AcceleratorBackend:
    """Base of the accelerators' backends. See `ascend_core.device.Backend` for the methods."""

    name: str
    can_pin: bool = True

    def unavailable_because(self) -> str | None:
        """Say why this machine lacks the backend; nothing when it has it."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None:
            return f"this build of torch ({torch.__version__}) has no accelerator."
        if accelerator.type != self.name:
            return f"the accelerator of this build of torch is {accelerator.type!r}."
        if not torch.accelerator.is_available():
            return f"torch sees no {self.name} device."
        return None

    def is_available(self) -> bool:
        """Whether there is such a device and torch can use it."""
        return self.unavailable_because() is None

    def device_count(self) -> int:
        """Return how many devices torch sees."""
        return torch.accelerator.device_count() if self.is_available() else 0

    def device(self, index: int | None = None) -> torch.device:
        """Return the device of that index, or the thread's current one.

        Raises:
            DeviceUnavailableError: When there is no device of that index.
        """
        if index is None:
            return torch.device(self.name, torch.accelerator.current_device_index())
        count = self.device_count()
        if not 0 <= index < count:
            raise DeviceUnavailableError(
                f"there is no device {self.name}:{index}.",
                why=f"torch sees {count} of them, counted from 0.",
                instead=f"use one of {self.name}:0 to {self.name}:{count - 1}.",
            )
        return torch.device(self.name, index)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """Return the calling thread's current stream on `device`."""
        # By number: torch looks a device up, which takes longer than all else here.
        index = None if device is None else device.index
        return cast("Stream", torch.accelerator.current_stream(index))

    def new_stream(self, device: torch.device | None = None) -> Stream:
        """Make a stream on `device`. Touches the device."""
        return cast("Stream", torch.Stream(device=self.device() if device is None else device))

    def new_event(self, *, timing: bool = False) -> Event:
        """Make an event."""
        return cast("Event", torch.Event(device=self.name, enable_timing=timing))

    @contextlib.contextmanager
    def stream_context(self, stream: Any) -> Iterator[None]:
        """Make `stream` and its device current in the calling thread, and put back what was.

        `with stream:` would keep what was current in the stream itself, which two threads that
        enter one copy stream at the same time would take from each other.
        """
        with torch.accelerator.device_index(stream.device.index):
            previous = torch.accelerator.current_stream(stream.device.index)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(previous)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Block the host until all work of `device` has ended."""
        torch.accelerator.synchronize(device)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's block, once freed, from reuse until `stream` is past this point."""
        tensor.record_stream(stream)

    def memory_stats(self, device: torch.device | None = None) -> Mapping[str, int]:
        """Return the caching allocator's statistics of `device`."""
        return cast("Mapping[str, int]", self._module.memory_stats(device))

    def reset_peak(self, device: torch.device | None = None) -> None:
        """Set the peaks of `device` to what is in use now."""
        self._module.reset_peak_memory_stats(device)

    def capabilities(self) -> Mapping[str, bool | str]:
        """Return what the current device can do."""
        return {
            "model": self._module.get_device_name(),
            "overlap": True,
            "bf16_matmul": bool(self._module.is_bf16_supported()),
        }

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the default generator of `device`."""
        return cast("torch.Tensor", self._module.get_rng_state(device))

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the state of the default generator of `device`."""
        self._module.set_rng_state(state, device)

    @property
    def _module(self) -> ModuleType:
        """`torch.cuda` or `torch.npu`."""
        return cast("ModuleType", torch.get_device_module(self.name))
