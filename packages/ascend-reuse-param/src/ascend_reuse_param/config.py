"""The options of the feature, as a frozen dataclass. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ascend_core.errors import ConfigError
from ascend_core.options import check_count, check_one_of

__all__ = ["KERNELS", "ROUNDINGS", "ReuseParamConfig"]

ROUNDINGS = ("nearest-even", "half-away")
KERNELS = ("auto", "native", "triton", "compiled", "eager")


@dataclasses.dataclass(frozen=True)
class ReuseParamConfig:
    """Options of `reuse_param`.

    Attributes:
        times: Into how many windows the parameters are cut, at most. A step that is not one kernel
            joins the masters of one window at a time: 4 bytes for each of its parameters. When left
            out, and `window_bytes` is left out too, 16; for a step that is one kernel, and joins
            no masters, 4.
        window_bytes: The most bytes of FP32 state in one window, instead of a number of windows.
        rounding: How an FP32 master becomes its BF16 weight: "nearest-even", to the bits of
            torch's cast, or "half-away", as MindSpeed does, which differs on ties and keeps no
            exceptions.
        kernels: What splits, joins and steps. "auto" takes the fastest that gives the same bits
            here: "native" on a CPU with a C compiler, "triton" on cuda where Triton is
            installed, else "eager", torch's own operators. "compiled" is `torch.compile` of these.
    """

    times: int | None = None
    window_bytes: int | None = None
    rounding: Literal["nearest-even", "half-away"] = "nearest-even"
    kernels: str = "auto"

    def __post_init__(self) -> None:
        for name in ("times", "window_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.times is not None and self.window_bytes is not None:
            raise ConfigError(
                "times and window_bytes were both given.",
                why="each of them says how large a window is.",
                instead="leave one of them out.",
            )
        check_one_of("rounding", self.rounding, ROUNDINGS)
        check_one_of("kernels", self.kernels, KERNELS)

    def windows(self, *, joins: bool) -> int | None:
        """The number of windows, with its default.

        Args:
            joins: Whether a step joins the masters of a window in memory.
        """
        if self.times is not None or self.window_bytes is not None:
            return self.times
        return 16 if joins else 4
