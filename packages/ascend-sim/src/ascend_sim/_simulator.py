"""The handle of a running simulation."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ascend_sim._runtime import Runtime
from ascend_sim.config import SimConfig
from ascend_sim.counters import Counters
from ascend_sim.inject import Fault, injected


class Simulator:
    """A simulated NPU. There is one per process, and it lives until the process ends.

    Attributes:
        config: What was asked for.
    """

    def __init__(self, config: SimConfig, runtime: Runtime) -> None:
        self.config = config
        self._runtime = runtime

    def counters(self) -> Counters:
        """Read the runtime's counters. Nothing is waited for."""
        return self._runtime.counters()

    def device_bytes(self, device: int = 0) -> int:
        """Bytes of a device's memory that the allocators hold of the runtime: cache included."""
        return self._runtime.device_bytes(device)

    def fail(self, fault: Fault, nth: int = 1) -> AbstractContextManager[None]:
        """Let the `nth` occurrence of `fault` within the block fail, once.

        A test walks through a whole step by raising `nth` until nothing is left to fail:

            for nth in itertools.count(1):
                try:
                    with simulator.fail(Fault.DEVICE_ALLOCATION, nth):
                        step()
                except torch.OutOfMemoryError:
                    ...  # what must hold after a failed step
                except FaultNotReachedError:
                    break

        Raises:
            ConfigError: When `nth` is not positive.
            FaultNotReachedError: When the block ends without having reached it.
        """
        return injected(self._runtime, fault, nth)

    def drain(self) -> None:
        """Run every task that was submitted, on all streams of all devices.

        Unlike `torch.npu.synchronize()` this is not counted and raises no task's error. It belongs
        between tests: within a tested step it hides races.
        """
        self._runtime.drain()

    def take_error(self) -> str | None:
        """Take the oldest error of a kernel that failed and that nobody was told of yet."""
        return self._runtime.take_error()

    def __repr__(self) -> str:
        return f"Simulator({self.config})"
