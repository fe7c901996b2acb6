"""The options of each feature, as frozen dataclasses. Imports no torch."""

from __future__ import annotations

import dataclasses
import os

from ascend_core.errors import ConfigError

__all__ = ["SwapOptimizerConfig"]


@dataclasses.dataclass(frozen=True)
class SwapOptimizerConfig:
    """Options of `swap_optimizer`.

    Attributes:
        swap_optimizer_times: Into how many windows the parameters are cut, at most. While a step
            runs, up to three windows of state are on the device: fewer, larger windows take more
            memory and overlap no better. 16 when left out and `window_bytes` is left out too.
        window_bytes: The most bytes of state in one window, instead of a number of windows.
        master_weights: Keep an FP32 master for each BF16 and FP16 parameter, on the host, and step
            that. Off, such parameters are stepped as they are, as the plain optimizer does.
        release_grads: Drop each gradient as soon as its parameter was stepped, so that their memory
            falls while the step runs.
        offload_gradients: Accumulate gradients on the host: each leaves the device as soon as
            backward has made it. Includes `release_grads`.
        host_budget_bytes: The most host memory that may be reserved; no limit when left out.
        disk: A folder on a fast disk for memory-mapped files, instead of page-locked memory. The
            files have no name there and vanish with the process.
    """

    swap_optimizer_times: int | None = None
    window_bytes: int | None = None
    master_weights: bool = False
    release_grads: bool = False
    offload_gradients: bool = False
    host_budget_bytes: int | None = None
    disk: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("swap_optimizer_times", "window_bytes", "host_budget_bytes"):
            _check_positive(name, getattr(self, name))
        for name in ("master_weights", "release_grads", "offload_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}.", instead="write True or False."
                )
        if self.swap_optimizer_times is not None and self.window_bytes is not None:
            raise ConfigError(
                "swap_optimizer_times and window_bytes were both given.",
                why="each of them says how large a window is.",
                instead="leave one of them out.",
            )
        if self.disk is not None and not isinstance(self.disk, (str, os.PathLike)):
            raise ConfigError(f"disk is {self.disk!r}.", instead="give the path of a folder.")

    @property
    def times(self) -> int | None:
        """The number of windows, with its default."""
        if self.swap_optimizer_times is None and self.window_bytes is None:
            return 16
        return self.swap_optimizer_times


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}.", instead="use a whole number above 0.")
