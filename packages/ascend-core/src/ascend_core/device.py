"""Which devices there are, and the one protocol through which the suite talks to each of them.

Importing this module touches no device. A backend is found by name, by what the machine has, or
from the tensor, module or device at hand; no other module names a device type.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from ascend_core._backends.cpu import CpuBackend
from ascend_core._backends.cuda import CudaBackend
from ascend_core._backends.npu import NpuBackend
from ascend_core.errors import ConfigError, DeviceUnavailableError
from ascend_core.streams import Event, Stream

__all__ = [
    "Backend",
    "available_backends",
    "backend_of",
    "current_backend",
    "device_of",
    "get_backend",
]


class Backend(Protocol):
    """One kind of device. Instances hold no state; two of one name are equal."""

    @property
    def name(self) -> str:
        """The device type as torch writes it: `"cpu"`, `"cuda"` or `"npu"`."""

    @property
    def can_pin(self) -> bool:
        """Whether page-locked host memory makes copies to and from the device asynchronous."""

    def unavailable_because(self) -> str | None:
        """Say why this machine lacks the backend; nothing when it has it."""

    def is_available(self) -> bool:
        """Whether this machine has the backend."""

    def device_count(self) -> int:
        """How many devices there are; 0 when the backend is not available."""

    def device(self, index: int | None = None) -> torch.device:
        """The device of that index, or the thread's current one, always as torch names it."""

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """The calling thread's current stream on `device`, read at each call."""

    def new_stream(self, device: torch.device | None = None) -> Stream:
        """A stream of its own on `device`."""

    def new_event(self, *, timing: bool = False) -> Event:
        """An event that was not recorded yet."""

    def stream_context(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` current in the calling thread for the length of a `with` block."""

    def synchronize(self, device: torch.device | None = None) -> None:
        """Block the host until all work of `device` has ended."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's block, once freed, from reuse until `stream` is past that moment."""

    def memory_stats(self, device: torch.device | None = None) -> Mapping[str, int]:
        """The allocator's statistics, `active_bytes.all.current` and `.peak` among them.

        In bytes and counts, by torch's names. Empty on the CPU: see `ascend_core.memory`.
        """

    def reset_peak(self, device: torch.device | None = None) -> None:
        """Set the allocator's peaks to what is in use now."""

    def capabilities(self) -> Mapping[str, bool | str]:
        """What the current device can do, by these keys.

        `model`: its name. `overlap`: copies and compute can run at the same time. `bf16_matmul`:
        natively. `fused_attention`, `fused_rms_norm`, `fused_rotary`, `fused_swiglu`: torch or
        torch_npu has one operator for it.
        """

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default generator of `device`: uint8, on the CPU."""

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the state of the default generator of `device`."""


# In the order of preference of `current_backend`.
_BACKENDS: Mapping[str, Backend] = {
    backend.name: backend for backend in (NpuBackend(), CudaBackend(), CpuBackend())
}

# What people call the devices that torch calls otherwise.
_USUAL_NAMES: Mapping[str, str] = {"ascend": "npu", "gpu": "cuda", "host": "cpu"}


def get_backend(name: str) -> Backend:
    """Find a backend by name: `"cpu"`, `"cuda"` or `"npu"`.

    Raises:
        ConfigError: When there is no backend of that name.
        DeviceUnavailableError: When this machine lacks it; the message says why and lists what
            there is.
    """
    backend = _backend_named(name)
    reason = backend.unavailable_because()
    if reason is not None:
        raise DeviceUnavailableError(
            f"there is no {name} device here.",
            why=reason,
            instead=f"use one of the backends that are available: "
            f"{', '.join(available_backends())}.",
        )
    return backend


def current_backend() -> Backend:
    """Return the best backend that this machine has: npu, else cuda, else cpu."""
    return next(backend for backend in _BACKENDS.values() if backend.is_available())


def available_backends() -> tuple[str, ...]:
    """Return the names of the backends that this machine has, the best first."""
    return tuple(name for name, backend in _BACKENDS.items() if backend.is_available())


def backend_of(target: torch.Tensor | nn.Module | torch.device | str) -> Backend:
    """Return the backend of the device that `device_of` finds; see there."""
    if isinstance(target, torch.Tensor):  # it exists, so its backend is available
        return _backend_named(target.device.type)
    return _backend_named(device_of(target).type)


def device_of(target: torch.Tensor | nn.Module | torch.device | str) -> torch.device:
    """Find the device of a tensor, a module, a device or a device string.

    A module's device is that of its parameters and buffers; a module that has neither goes where
    new work goes, to the current device of `current_backend()`. A device without an index is the
    thread's current one of its type; `"cpu:0"` is the CPU.

    Raises:
        ConfigError: When the module is spread over several devices, or no backend is called so.
        DeviceUnavailableError: When this machine lacks the device.
    """
    if isinstance(target, torch.Tensor):
        return target.device
    if isinstance(target, nn.Module):
        return _device_of_module(target)
    # The name is checked before torch parses it: torch knows "npu" only once torch_npu is imported.
    backend = get_backend(str(target).partition(":")[0])
    return backend.device(_parse(str(target)).index)


def _device_of_module(module: nn.Module) -> torch.device:
    devices = sorted({str(t.device) for t in chain(module.parameters(), module.buffers())})
    if not devices:
        return current_backend().device()
    if len(devices) > 1:
        raise ConfigError(
            f"the {type(module).__name__} has no single device.",
            why=f"its parameters and buffers are on {', '.join(devices)}.",
            instead="move it to one device, or pass the part that is on one.",
        )
    return torch.device(devices[0])


def _parse(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"{device!r} is no device.",
            why=str(error).partition("\n")[0],
            instead="write the type alone, or type:index, as in 'cuda:0'.",
        ) from error


def _backend_named(name: str) -> Backend:
    if name in _BACKENDS:
        return _BACKENDS[name]
    if name == "meta":
        raise ConfigError(
            "there is no backend called 'meta'.",
            why="what is on the meta device has a shape, and no memory.",
            instead="give the module memory before: module.to_empty(device=...).",
        )
    meant = _USUAL_NAMES.get(name.lower()) or next(
        iter(difflib.get_close_matches(name.lower(), _BACKENDS, n=1)), None
    )
    raise ConfigError(
        f"there is no backend called {name!r}.",
        why=f"the backends are: {', '.join(_BACKENDS)}.",
        instead=f"did you mean {meant!r}?" if meant else "use one of them.",
    )
