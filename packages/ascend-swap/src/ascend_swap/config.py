"""The options of each feature, as frozen dataclasses. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ascend_core.errors import ConfigError
from ascend_core.options import check_count

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SwapAttentionConfig", "SwapOptimizerConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwapAttentionConfig:
    """Options of `swap_attention`.

    Attributes:
        swap_modules: The modules whose saved activations move: qualified names
            ("blocks.0.attention"), attribute names ("self_attention") or module types; one string
            may hold several names, with commas between them. By default "input_norm",
            "self_attention" and "post_attention_norm", as far as the model has them; in a model
            without "self_attention", every module that looks like attention by its name.
        recompute_num_layers: In how many layers, counted from the first (of each pipeline stage),
            the MLP is recomputed in backward; its input moves too. None recomputes nothing.
        min_bytes: The smallest storage that moves, in bytes. A copy costs tens of microseconds
            however small it is.
        prefetch: How many layers ahead of the one in which backward is are copied back.
        host_budget: The most host memory that may be reserved, in bytes. What it has no room for
            stays on the device, with a warning. None sets no limit.
        keep_last: How many of the last layers stay on the device, since their backward comes at
            once. None finds out from the first steps: a layer stays whose backward followed its own
            forward, or began before its copies to the host had ended, twice in a row.
    """

    swap_modules: str | Sequence[str | type[nn.Module]] | None = None
    recompute_num_layers: int | None = None
    min_bytes: int = 1 << 20
    prefetch: int = 1
    host_budget: int | None = None
    keep_last: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: When a value cannot be right whatever the model is.
        """
        _check_swap_modules(self.swap_modules)
        _check_positive("recompute_num_layers", self.recompute_num_layers)
        _check_positive("host_budget", self.host_budget)
        if self.min_bytes is None:
            raise ConfigError("min_bytes is None.", instead="use 1 to move every activation.")
        _check_positive("min_bytes", self.min_bytes)
        if self.prefetch is None:
            raise ConfigError("prefetch is None.", instead="use 0 to fetch nothing ahead.")
        _check_count("prefetch", self.prefetch)
        _check_count("keep_last", self.keep_last)

    @property
    def names(self) -> tuple[str | type[nn.Module], ...] | None:
        """The names and types of `swap_modules`, one by one."""
        wanted = self.swap_modules
        if isinstance(wanted, str):
            return tuple(name.strip() for name in wanted.split(","))
        return None if wanted is None else tuple(wanted)


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
    if value is not None:
        check_count(name, value)


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {value!r}.", instead="use a whole number, 0 or above.")


def _check_swap_modules(wanted: object) -> None:
    if wanted is None:
        return
    if isinstance(wanted, str):
        names: Sequence[object] = wanted.split(",")
    elif isinstance(wanted, Sequence):
        names = wanted
    else:
        raise ConfigError(
            f"swap_modules is {wanted!r}.",
            why="a sequence of names or types is wanted, or one string of names.",
            instead='write for example swap_modules="input_norm,self_attention".',
        )
    for name in names:
        if not (isinstance(name, type) or (isinstance(name, str) and name.strip())):
            raise ConfigError(
                f"swap_modules holds {name!r}.",
                why="modules are selected by name or by type.",
                instead="name the module as model.named_modules() does, or pass its class.",
            )
    if not names:
        raise ConfigError("swap_modules is empty.", instead="leave it out to take attention.")
