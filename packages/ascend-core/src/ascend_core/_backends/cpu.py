"""The CPU: everything runs inline, in the order of the program."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Mapping

import torch

from ascend_core.streams import Event, InlineEvent, InlineStream, Stream

__all__ = ["CpuBackend"]


_STREAM = InlineStream()


@dataclasses.dataclass(frozen=True)
class CpuBackend:
    """The backend that every machine has. See `ascend_core.device.Backend` for the methods."""

    name: str = "cpu"
    can_pin: bool = False

    def unavailable_because(self) -> None:
        """Return nothing: there is always a CPU."""

    def is_available(self) -> bool:
        """Return true: there is always a CPU."""
        return True

    def device_count(self) -> int:
        """Return 1: torch knows one CPU."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return the CPU, under torch's usual name for it, which has no index."""
        return torch.device("cpu")

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """Return the one inline stream."""
        return _STREAM

    def new_stream(self, device: torch.device | None = None) -> Stream:
        """Return the one inline stream: it is equal to the current stream."""
        return _STREAM

    def new_event(self, *, timing: bool = False) -> Event:
        """Return an inline event."""
        return InlineEvent(timing=timing)

    def stream_context(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is one stream, and it is current."""
        return contextlib.nullcontext()

    def synchronize(self, device: torch.device | None = None) -> None:
        """Do nothing: what came before has ended."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: no block is in use after the call that used it."""

    def memory_stats(self, device: torch.device | None = None) -> Mapping[str, int]:
        """Return no statistics: torch's CPU allocator keeps none."""
        return {}

    def reset_peak(self, device: torch.device | None = None) -> None:
        """Do nothing: torch's CPU allocator keeps no statistics."""

    def capabilities(self) -> Mapping[str, bool | str]:
        """Return what the CPU can do; bf16 matmul counts only where instructions exist for it."""
        return {
            "model": platform.machine(),
            "overlap": False,
            "bf16_matmul": bool(
                torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
            ),
            "fused_attention": True,
            "fused_rms_norm": False,
            "fused_rotary": False,
            "fused_swiglu": False,
        }

    def get_rng_state(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the state of torch's default CPU generator."""
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        """Set the state of torch's default CPU generator."""
        torch.default_generator.set_state(state)
