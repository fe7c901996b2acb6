"""What becomes of an operator on the simulated device."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from collections.abc import Callable


class Fate(enum.Enum):
    """What runs when a program calls an operator on the device."""

    SIMULATED = 0
    """The CPU's kernel, in stream order, on the device's memory."""
    COMPOSED = 1
    """torch's own composite of simulated operators."""
    KEPT = 2
    """torch_npu's own code: allocation, views, storages, streams."""
    LEFT = 3
    """torch_npu's fallback to the CPU: the NPU has no such operator. An error with `strict`."""
    ABSENT = 4
    """Nothing: torch_npu has the operator, the simulation no kernel, and a call fails."""


@dataclasses.dataclass(frozen=True)
class KernelCalls:
    """Calls of simulated operators since the process began.

    Attributes:
        enqueued: Returned at once; a task of the stream did the work.
        inline: Ran at once, after everything on the stream: the shape of an output depends on
            data, or could not be known. A race around such a call stays hidden.
        known: Calls whose outputs were known from an earlier call.
    """

    enqueued: int
    inline: int
    known: int


class Kernels:
    """The loaded library of kernels.

    Args:
        library: After its installation.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for function in (library.ascendsim_kernels_names, library.ascendsim_kernels_left_calls):
            function.restype = ctypes.c_uint64

    def names(self, fate: Fate) -> list[str]:
        """Name all operators of a fate, sorted."""

        def write(buffer: ctypes.Array[ctypes.c_char] | None, size: int) -> int:
            function = self._library.ascendsim_kernels_names
            return int(function(fate.value, buffer, ctypes.c_uint64(size)))

        return sorted(_text(write).split())

    def left_calls(self) -> dict[str, int]:
        """Count the calls of operators that were left to torch_npu."""

        def write(buffer: ctypes.Array[ctypes.c_char] | None, size: int) -> int:
            function = self._library.ascendsim_kernels_left_calls
            return int(function(buffer, ctypes.c_uint64(size)))

        lines = [line.split() for line in _text(write).splitlines()]
        return {name: int(calls) for name, calls in lines}

    def calls(self) -> KernelCalls:
        """Count the calls of simulated operators."""
        counts = (ctypes.c_uint64 * len(dataclasses.fields(KernelCalls)))()
        self._library.ascendsim_kernels_calls(counts)
        return KernelCalls(*counts)

    def set_strict(self, strict: bool) -> None:
        """Make a call of an operator that is left to torch_npu an error, or not."""
        self._library.ascendsim_kernels_strict(int(strict))


def _text(write: Callable[[ctypes.Array[ctypes.c_char] | None, int], int]) -> str:
    """Read a text from a function that tells how much room it needs."""
    room = write(None, 0)
    buffer = ctypes.create_string_buffer(room + 1)
    write(buffer, room + 1)
    return buffer.value.decode()
