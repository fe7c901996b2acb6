"""The ambient state that decides what a function computes, captured in forward and replayed later.

Autograd's engine runs a device's backward in a thread of its own, where none of the forward's
thread-local state holds (autocast, the default device), and the default dtype may have changed in
every thread by then. So a replay sets all of it, and puts all of it back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._device import DeviceContext

from ascend_core._turns import taking_turns
from ascend_core.errors import ConfigError
from ascend_core.rng import RngState

__all__ = ["ContextFactory", "ForwardState"]

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(slots=True)
class ForwardState:
    """What a forward ran under.

    Attributes:
        devices: The devices whose state was read beside the CPU's.
        rng: The generators' states; nothing when they were not asked for.
        default_dtype: `torch.get_default_dtype()`.
        default_device: What `with torch.device(...)` or `torch.set_default_device` has set;
            nothing when neither has.
        autocast: For each device type, whether autocast is enabled, and its dtype.
        autocast_cache: Whether autocast keeps its casts of weights.
        context_fn: Makes the user's own context, for replays only.
    """

    devices: tuple[torch.device, ...]
    rng: RngState | None
    default_dtype: torch.dtype
    default_device: torch.device | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    context_fn: ContextFactory | None = None

    @classmethod
    def capture(
        cls,
        *,
        devices: Iterable[torch.device] = (),
        rng: bool = True,
        context_fn: ContextFactory | None = None,
    ) -> ForwardState:
        """Read the state of the calling thread. Draws nothing.

        To be called around operators (in a forward, a module hook, a function mode), not from
        inside one as a saved-tensor hook is: there torch hides the default device's mode.

        Args:
            devices: The devices that the forward uses beside the CPU: their generators and the
                autocast state of their types are read too.
            rng: Whether to read the generators, which is needed where the forward may draw.
            context_fn: Makes a context manager that each replay enters, for what torch does not
                know of. Not entered now. None, False and 0 all mean "none".

        Raises:
            ConfigError: When `context_fn` cannot be called.
            DeviceUnavailableError: When this machine lacks one of the devices.
        """
        if context_fn and not callable(context_fn):
            raise ConfigError(
                f"context_fn is a {type(context_fn).__name__}, which cannot be called.",
                why="each replay needs a context manager of its own.",
                instead="pass a function without arguments that returns one.",
            )
        devices = tuple(devices)
        types = dict.fromkeys(["cpu", *[device.type for device in devices]])
        return cls(
            devices,
            RngState.capture(devices) if rng else None,
            torch.get_default_dtype(),
            _default_device(),
            tuple([(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]),
            torch.is_autocast_cache_enabled(),
            context_fn or None,
        )

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Compute inside the `with` block what the forward computed.

        Everything is afterwards as it was before the block, the position of the generators
        included, also after an exception. The user's context is entered last. Works in any
        thread; threads that replay take turns, since the default dtype and the generators belong
        to the process. One that replays within another's block, as autograd's threads do in a
        backward, has its turn there.
        """
        with taking_turns():
            ambient = ForwardState.capture(devices=self.devices, rng=self.rng is not None)
            # (Autocast's own count of regions is the thread's; in a thread of autograd's it is 0.)
            in_region = torch.autocast_increment_nesting() > 1 or ambient._autocasts
            try:
                self._restore()
                if in_region and not self._shares_casts_with(ambient):
                    torch.set_autocast_cache_enabled(False)
                with self._contexts(ambient):
                    yield
            finally:
                ambient._restore()
                if torch.autocast_decrement_nesting() == 0 and not in_region:
                    torch.clear_autocast_cache()

    @property
    def _autocasts(self) -> bool:
        """Whether autocast is on for any of the device types."""
        return any(enabled for _, enabled, _ in self.autocast)

    def _shares_casts_with(self, ambient: ForwardState) -> bool:
        """Whether a replay may use the casts of weights that autocast caches for the region.

        [Note: one cache of casts for the process]
        A replay within an autocast region uses the casts that the region's forwards made, and
        leaves its own to them: a later forward then shares its casts with an earlier one as it
        does without a replay (one sum of gradients in BF16 has other bits than two). But never a
        cast that is of no use to a forward, of another dtype or made without grad. Where no region
        is around, the cache is the replay's own, and emptied after it: nobody else would do that,
        and weights change.
        """
        return torch.is_grad_enabled() and ambient.autocast == self.autocast

    def _restore(self) -> None:
        """Set everything that can be set, rather than entered."""
        if torch.get_default_dtype() is not self.default_dtype:  # setting it takes 10 times as long
            torch.set_default_dtype(self.default_dtype)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        if self.rng is not None:
            self.rng.restore()

    def _contexts(self, ambient: ForwardState) -> AbstractContextManager[Any]:
        """Make one context of those that must be entered: a default device, the user's own."""
        if self.default_device == ambient.default_device and self.context_fn is None:
            return contextlib.nullcontext()
        return self._entered(ambient)

    @contextlib.contextmanager
    def _entered(self, ambient: ForwardState) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.default_device != ambient.default_device:
                # Where forward had no default device, it had the CPU.
                stack.enter_context(DeviceContext(self.default_device or torch.device("cpu")))
            if self.context_fn is not None:
                stack.enter_context(self.context_fn())
                if self.rng is not None:
                    self.rng.restore()  # entering the user's context may have drawn
            yield


def _default_device() -> torch.device | None:
    # The innermost of the modes that set one: `torch.set_default_device` keeps its own at the
    # bottom of the thread's stack, `with torch.device(...)` pushes another.
    # (`torch.get_default_device` makes a tensor to find the index, which touches the device.)
    for place in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
