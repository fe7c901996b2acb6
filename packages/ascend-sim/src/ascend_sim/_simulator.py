"""The handle of a running simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from ascend_sim._runtime import Runtime
from ascend_sim.config import SimConfig
from ascend_sim.counters import Counters
from ascend_sim.errors import ConfigError, RefusedError
from ascend_sim.inject import Fault, injected
from ascend_sim.kernels import Fate, Kernels
from ascend_sim.races import Race
from ascend_sim.timeline import Timeline


class Simulator:
    """A simulated NPU. There is one per process, and it lives until the process ends.

    Attributes:
        config: What was asked for.
    """

    def __init__(self, config: SimConfig, runtime: Runtime, kernels: Kernels) -> None:
        self.config = config
        self._runtime = runtime
        self._kernels = kernels
        self._keeps_timeline = False

    def counters(self) -> Counters:
        """Read the runtime's counters. Nothing is waited for."""
        return self._runtime.counters()

    def device_bytes(self, device: int = 0) -> int:
        """Bytes of a device's memory that the allocators hold of the runtime: cache included."""
        return self._runtime.device_bytes(device)

    def fail(self, fault: Fault, nth: int = 1) -> AbstractContextManager[None]:
        """Let the `nth` occurrence of `fault` within the block fail; once, but for a segment.

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
            ConfigError: When `fault` is none, `nth` is no positive number, or a block around this
                one waits for the same fault.
            FaultNotReachedError: When the block ends without having reached it.
        """
        return injected(self._runtime, fault, nth)

    def operators(self, fate: Fate) -> list[str]:
        """Name all operators of a fate, such as those that the NPU does not have (`Fate.LEFT`).

        Raises:
            ConfigError: When `fate` is none.
        """
        if not isinstance(fate, Fate):
            known = ", ".join(str(known) for known in Fate)
            raise ConfigError(f"{fate!r} is no fate.", instead=f"one of {known}")
        return self._kernels.names(fate)

    def left_calls(self) -> dict[str, int]:
        """Count the calls of operators that were left to torch_npu's fallback, by name."""
        return self._kernels.left_calls()

    @contextlib.contextmanager
    def strict(self, strict: bool = True) -> Iterator[None]:
        """Within the block, make a call of an operator that the NPU does not have an error."""
        self._kernels.set_strict(strict)
        try:
            yield
        finally:
            self._kernels.set_strict(self.config.strict)

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Keep what happens within the block on the modelled clock of the schedule "timed".

        The handle is filled when the block ends. Before and after, all streams are drained, so that
        nothing crosses the block's borders; the drain at the end is no wait of the program's.

            with simulator.timeline() as timeline:
                step()
            print(timeline.report())

        Raises:
            RefusedError: In another schedule: there is no clock. Or within another such block.
        """
        if self.config.schedule != "timed":
            raise RefusedError(
                "There is no timeline here.",
                why=f'only the schedule "timed" has a clock, and this is "{self.config.schedule}"',
                instead='start(schedule="timed"), or pytest --npu-sim=timed',
            )
        if self._keeps_timeline:
            raise RefusedError(
                "A timeline is being kept already.",
                why="a block drains all streams, which would show in the outer one",
                instead="one block, or one after the other",
            )
        self._runtime.drain()
        timeline = Timeline(self._runtime.clock_ns(), round(self.config.rates().launch_us * 1000))
        self._runtime.keep_spans(True)
        self._keeps_timeline = True
        try:
            yield timeline
        finally:
            host_ns = self._runtime.clock_ns()
            self._runtime.drain()
            self._runtime.keep_spans(False)
            self._keeps_timeline = False
            timeline.fill(self._runtime.spans(), host_ns)

    def races(self) -> list[Race]:
        """Take the races that were found since the last call; `trace` must be on.

        Each names two tasks that touch the same bytes, one of them writing, with nothing that
        orders them. They are found whether or not a value went wrong. A query of an event that is
        answered "reached" is an order, the allocators' included: in "lazy" and "early" few are, so
        most is found there. What the host reads and writes itself is not seen.

        Raises:
            RefusedError: When `trace` is off.
        """
        if not self.config.trace:
            raise RefusedError(
                "Races are not traced here.",
                why="the option trace is off",
                instead="start(trace=True), or ASCENDSIM_TRACE=1",
            )
        return self._runtime.take_races()

    def reseed(self) -> None:
        """Let the schedule "random" choose as at its beginning. The plug-in does before a test."""
        self._runtime.reseed()

    def drain(self) -> None:
        """Run every task that was submitted, on all streams of all devices.

        Unlike `torch.npu.synchronize()` this is not counted and raises no task's error. It belongs
        between tests: within a tested step it hides races. On a device that has stopped, what was
        submitted is dropped instead.
        """
        self._runtime.drain()

    def take_error(self) -> str | None:
        """Let devices go on that have stopped, since a task of theirs failed.

        On a real device only a reset ends that, which frees all its memory: a program starts anew,
        from a checkpoint. A test need not, and the plug-in takes the error when a test ends.

        Returns:
            The oldest error that nobody was told of, if there is one.
        """
        return self._runtime.take_error()

    def __repr__(self) -> str:
        return f"Simulator({self.config})"
