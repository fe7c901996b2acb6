"""The codec in Triton, on a CUDA device: one kernel, one program for each block.

[Note: proven on the spot] The kernels are compiled by what the user has installed, for the device
at hand, and no test of ours has seen that pair. So before a codec is handed out it splits and joins
a few blocks, among them every class of bits, and each bit is compared with what torch's operators
make of them. What Triton raises where it cannot work (no compiler for its launcher, an old driver)
comes up there too, and not in the first step.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ascend_core.errors import UnavailableError
from ascend_core.optim.arena import Arena
from ascend_reuse_param._bits import BLOCK, Parts, Rounding, blocks_of
from ascend_reuse_param._fingerprint import PLAIN, WEIGHTED
from ascend_reuse_param._kernels.eager import EagerCodec

__all__ = ["COMPILING", "TritonCodec", "TritonKernels"]

# How every kernel is compiled. A thread of 8 warps holds 16 elements: a step of these takes 128 of
# its 255 registers on sm_80, and of 32 elements, with 4 warps, 240. No product is fused with a sum
# but where the kernel says so.
COMPILING: Mapping[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
_KERNELS = "ascend_reuse_param._kernels.triton_kernels"
_LOWS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


class TritonKernels:
    """The kernels and the tables that they read, on a device.

    Args:
        device: Where.

    Raises:
        UnavailableError: When Triton is not installed, or cannot be imported.

    Attributes:
        module: What is launched; see `triton_kernels`.
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            # Only here: importing Triton takes long, and few have it.
            self.module: Any = importlib.import_module(_KERNELS)
        except ImportError as error:
            raise UnavailableError(
                "Triton cannot be imported.",
                why=f"{error}.",
                instead='install the Triton of this torch, or use kernels="eager".',
            ) from error
        self.device = device
        self._tables = tuple(
            torch.tensor(table, dtype=torch.int64, device=device) for table in (WEIGHTED, PLAIN)
        )

    def here(self) -> AbstractContextManager[Any]:
        """Triton launches on the current device, so make it this one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def arguments(self, weight: torch.Tensor, parts: Parts) -> tuple[torch.Tensor | None, ...]:
        """What each kernel reads to know where a weight and its parts are."""
        tensors = (weight, parts.residual, parts.bitmap, parts.fingerprints)
        for tensor in tensors:
            assert tensor is None or tensor.is_contiguous()
            assert tensor is None or tensor.device.type == self.device.type
        return (weight.view(torch.int16), *tensors[1:], *self._tables)


class TritonCodec:
    """Splits and joins in one kernel, each.

    Args:
        device: Where the tensors are.
        rounding: See `_bits`.

    Raises:
        UnavailableError: When Triton is not here, does not work on this device, or gives other bits
            than torch's operators; then `EagerCodec` does the same.

    Attributes:
        kernels: What is launched.
    """

    def __init__(self, device: torch.device, rounding: Rounding = "nearest-even") -> None:
        self.rounding: Rounding = rounding
        self.kernels = TritonKernels(device)
        self._prove()

    def scratch_bytes(self, numel: int) -> int:
        """Nothing: what is in between stays in registers."""
        return 0

    def split(
        self, master: torch.Tensor, weight: torch.Tensor, parts: Parts, scratch: Arena
    ) -> None:
        """See `Codec.split`."""
        self._launch(self.kernels.module.split, master, weight, parts)

    def join(
        self, weight: torch.Tensor, parts: Parts, master: torch.Tensor, scratch: Arena
    ) -> None:
        """See `Codec.join`."""
        self._launch(self.kernels.module.join, master, weight, parts)

    def _launch(
        self, kernel: Any, master: torch.Tensor, weight: torch.Tensor, parts: Parts
    ) -> None:
        to_even = self.rounding == "nearest-even"
        assert (parts.bitmap is not None) == to_even
        assert master.is_contiguous() and master.dtype == torch.float32
        numel = master.numel()
        if numel == 0:  # there is no grid of no program
            return
        arguments = self.kernels.arguments(weight, parts)
        with self.kernels.here():
            kernel[(blocks_of(numel),)](
                master.view(torch.int32), *arguments, numel, TO_EVEN=to_even, **COMPILING
            )

    def _prove(self) -> None:
        try:
            is_equal = self._equals_eager()
        except Exception as error:  # Triton's own have no common base
            raise UnavailableError(
                "Triton's kernels cannot be used here.",
                why=f"trying them ended with {type(error).__name__}: {error}",
                instead='mend that, or use kernels="eager".',
            ) from error
        if not is_equal:
            raise UnavailableError(
                "Triton's kernels are not used: they would not equal torch's operators.",
                why="on this device, this Triton computes other bits.",
                instead="nothing need be done: torch's operators give the right ones, more slowly.",
            )

    def _equals_eager(self) -> bool:
        """Split and join every class of bits by both, where one block was written by others."""
        device = self.kernels.device
        lows = torch.tensor(_LOWS, dtype=torch.int32, device=device)
        highs = torch.arange(-(1 << 15), 1 << 15, 31, dtype=torch.int32, device=device) << 16
        bits = (highs.unsqueeze(1) | lows).view(-1)
        master, numel = bits.view(torch.float32), bits.numel()
        left: list[torch.Tensor] = []
        for codec in (self, EagerCodec(device, self.rounding)):
            weight = torch.empty(numel, dtype=torch.bfloat16, device=device)
            parts = Parts.empty(numel, device, self.rounding)
            joined = torch.empty(numel, dtype=torch.float32, device=device)
            scratch = Arena(codec.scratch_bytes(numel), device)
            codec.split(master, weight, parts, scratch)
            weight[BLOCK : BLOCK + 1] = 4.0
            codec.join(weight, parts, joined, scratch)
            tensors = (weight.view(torch.int16), parts.residual, parts.bitmap, parts.fingerprints)
            left += [joined.view(torch.int32), *(t for t in tensors if t is not None)]
        half = len(left) // 2
        return all(map(torch.equal, left[:half], left[half:]))
