"""Kernels of Triton, and what came of trying them on a device.

[Note: proven on the spot] Kernels are compiled by what the user has installed, for the device at
hand, and no test of ours has seen that pair. So before an operator is computed by them on a device
they compute a small case of each class there, and the results are compared with those of torch's
operators: the bits where bits are promised, and else within a tolerance that the operator's module
states. What Triton raises where it cannot work (no compiler for its launcher, an old driver) comes
up there too, and not in the first step. A trial waits for the device, and so it cannot be made
while a CUDA graph is captured: what is captured has run before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ascend_core.device import current_backend
from ascend_core.errors import UnavailableError

__all__ = ["Comparison", "Trial", "here", "kernels_of", "pattern"]

# What Triton computed, what torch's operators made of the same, and how far they may be apart,
# absolutely and relatively; 0 asks for the same bits.
Comparison = tuple[Tensor, Tensor, float]


class Trial:
    """Whether kernels are to be used, asked once for each device.

    Args:
        compare: Computes the cases on a device, by Triton and by torch's operators.
    """

    def __init__(self, compare: Callable[[torch.device], Iterator[Comparison]]) -> None:
        self._compare = compare
        self._found: dict[torch.device, UnavailableError | None] = {}

    def failure(self, device: torch.device) -> UnavailableError | None:
        """Why they are not to be used on a device; None where they are.

        Makes the host wait for the device, the first time.
        """
        if device not in self._found:
            self._found[device] = self._try(device)
        return self._found[device]

    def demand(self) -> None:
        """Ask for the current accelerator, or the CPU (Triton's interpreter) where there is none.

        Raises:
            UnavailableError: When they are not to be used there.
        """
        if failure := self.failure(current_backend().device()):
            raise failure

    def _try(self, device: torch.device) -> UnavailableError | None:
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                agree = all(_agree(*comparison) for comparison in self._compare(device))
        except Exception as error:  # Triton's own have no common base
            return UnavailableError(
                f"Triton's kernels cannot be used on {device}.",
                why=f"trying them ended with {type(error).__name__}: {error}",
                instead='mend that, or use backend="eager".',
            )
        if agree:
            return None
        return UnavailableError(
            f"Triton's kernels are not used on {device}: they do not agree with torch's operators.",
            why="what this Triton compiles for this device computes something else.",
            instead="nothing need be done: torch's operators give the right results, more slowly.",
        )


def kernels_of(operator: str) -> Any:
    """Import the kernels of an operator, and Triton with them.

    Raises:
        UnavailableError: When Triton is not installed, or cannot be imported.
    """
    try:
        # Only here: importing Triton takes long, and few have it.
        return importlib.import_module(f"ascend_ops._kernels.triton_kernels.{operator}")
    except ImportError as error:
        raise UnavailableError(
            "Triton cannot be imported.",
            why=f"{error}.",
            instead='install the Triton of this torch, or use backend="eager".',
        ) from error


def here(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, so make it this one."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def pattern(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, turn: float = 0.0
) -> Tensor:
    """Numbers between -2 and 2 that look like any, other ones for another `turn`."""
    count = torch.Size(shape).numel()
    angles = torch.arange(count, dtype=torch.float64, device=device) * 1.618 + turn
    return (2 * angles.sin()).view(shape).to(dtype)


def _agree(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if tolerance == 0:
        return torch.equal(ours, theirs)
    return torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
