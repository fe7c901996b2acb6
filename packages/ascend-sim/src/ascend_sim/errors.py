"""Every error that ascend-sim raises itself.

    SimError
    ├── ConfigError            an option that cannot be (also a ValueError)
    ├── RefusedError           this process cannot have a simulated NPU (also a RuntimeError)
    ├── BuildError             the native code did not compile (also a RuntimeError)
    └── FaultNotReachedError   an injected fault that nothing ran into (also an AssertionError)

What the simulated device itself reports (out of memory, a failed kernel) comes as the exception
that torch_npu raises for it.
"""

from __future__ import annotations


class SimError(Exception):
    """Something is wrong, why, and what to do instead.

    Attributes:
        what: One sentence.
        why: The reason, if there is more to it than `what` says.
        instead: What the caller can do.
    """

    def __init__(self, what: str, *, why: str = "", instead: str = "") -> None:
        lines = [what]
        if why:
            lines.append(f"  why      {why}")
        if instead:
            lines.append(f"  instead  {instead}")
        super().__init__("\n".join(lines))
        self.what = what
        self.why = why
        self.instead = instead


class ConfigError(SimError, ValueError):
    """An option that cannot be."""


class RefusedError(SimError, RuntimeError):
    """This process cannot have a simulated NPU."""


class BuildError(SimError, RuntimeError):
    """The native code did not compile."""


class FaultNotReachedError(SimError, AssertionError):
    """An injected fault that nothing ran into."""
