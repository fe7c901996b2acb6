"""The state of the random number generators, captured once and replayed without a trace."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch

from ascend_core._turns import taking_turns
from ascend_core.device import Backend, backend_of

__all__ = ["RngState"]


@dataclasses.dataclass(slots=True)
class RngState:
    """The states of the CPU's default generator and of those of some devices.

    Attributes:
        cpu: The state of the CPU's generator, uint8.
        others: The state of each device's generator, uint8 on the CPU, with its backend.
    """

    cpu: torch.Tensor
    others: tuple[tuple[torch.device, Backend, torch.Tensor], ...] = ()

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> RngState:
        """Read the generators' states. Draws nothing.

        Args:
            devices: The devices whose generators to read beside the CPU's.

        Raises:
            DeviceUnavailableError: When this machine lacks one of the devices.
        """
        others = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
        if not others:
            return cls(torch.default_generator.get_state())
        backends = [backend_of(device) for device in others]
        return cls(
            torch.default_generator.get_state(),
            tuple((d, b, b.get_rng_state(d)) for d, b in zip(others, backends, strict=True)),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.default_generator.set_state(self.cpu)
        for device, backend, state in self.others:
            backend.set_rng_state(state, device)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Draw inside the `with` block what was drawn after the capture.

        The generators are then as they were before the block, also after an exception. Threads
        that replay take turns; one that replays within another's block, as autograd's do in a
        backward, has its turn there. What another thread draws meanwhile outside of any replay
        comes from the same generators, as ever.
        """
        with taking_turns():
            ambient = RngState.capture(device for device, _, _ in self.others)
            try:
                self.restore()
                yield
            finally:
                ambient.restore()
