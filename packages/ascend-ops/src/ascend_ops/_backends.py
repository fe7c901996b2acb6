"""Which backend computes a call of an operator.

A backend is a folder of `_kernels`: a module for each operator that it has, whose `load()` returns
the kernel or raises UnavailableError. A call goes to the first backend of its device that can be
loaded and refuses neither the arguments nor the machine; `eager`, torch's own operators, takes all.
It is what FP64 is computed by on every device, without a word: fused kernels are for training, and
FP64 is for checking gradients.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ascend_core.errors import ConfigError, UnavailableError

__all__ = ["BACKENDS", "Kernel", "choose"]

# What a device's calls prefer, by the device's type.
_PREFERRED = {"cpu": ("cpu",), "cuda": ("triton",), "npu": ("npu",)}
BACKENDS = ("eager", *(name for names in _PREFERRED.values() for name in names))


class Kernel(Protocol):
    """How a backend computes one operator; each operator's module says what else it has."""

    def refusal(self, *call: Any) -> str | None:
        """Why a call cannot be taken, in a sentence with its full stop; None where it can be."""


def choose(operator: str, wanted: str | None, tensor: Tensor, *call: Any) -> tuple[str, Any]:
    """Choose the backend of a call.

    Where the first of its tensors is FP64, that is `eager`. Where it is `eager` because the kernel
    of the device cannot be had, a warning says so, once.

    Args:
        operator: Its name.
        wanted: The backend that the caller named; None leaves the choice to this function.
        tensor: The first of the call: all are on its device.
        call: What the kernels' `refusal` is given.

    Returns:
        The backend's name, and its kernel for this operator.

    Raises:
        ConfigError: When there is no backend called `wanted`, or it refuses this call.
        UnavailableError: When `wanted` cannot be used on this machine.
    """
    if wanted is not None:
        return wanted, _named(operator, wanted, call)
    is_fp64 = tensor.dtype == torch.float64
    for name in () if is_fp64 else _PREFERRED.get(tensor.device.type, ()):
        if not _exists(operator, name):
            continue
        kernel = _load(operator, name)
        reason = str(kernel) if isinstance(kernel, UnavailableError) else kernel.refusal(*call)
        if reason is None:
            return name, kernel
        _say(operator, name, reason)
    return "eager", _load(operator, "eager")


def _named(operator: str, backend: str, call: Sequence[Any]) -> Any:
    if backend not in BACKENDS or not _exists(operator, backend):
        known = ", ".join(name for name in BACKENDS if _exists(operator, name))
        raise ConfigError(
            f"{operator} has no backend {backend!r}.",
            instead=f"name one of {known}, or leave it out.",
        )
    kernel = _load(operator, backend)
    if isinstance(kernel, UnavailableError):
        # One that is kept would keep the tensors of the call that it ended, by its traceback.
        raise copy.copy(kernel)
    if reason := kernel.refusal(*call):
        raise ConfigError(
            f"{operator} cannot be computed by the backend {backend!r}.",
            why=reason,
            instead="leave the backend out, and one that can is chosen.",
        )
    return kernel


def _module(operator: str, backend: str) -> str:
    return f"ascend_ops._kernels.{backend}.{operator}"


@functools.cache
def _exists(operator: str, backend: str) -> bool:
    return importlib.util.find_spec(_module(operator, backend)) is not None


@functools.cache
def _load(operator: str, backend: str) -> Any:
    """The kernel, or the error that says why it is not to be had: asked once, as it takes long."""
    try:
        return importlib.import_module(_module(operator, backend)).load()
    except UnavailableError as error:
        return copy.copy(error)  # without its traceback and cause: see `_named`


@functools.cache
def _say(operator: str, backend: str, reason: str) -> None:
    """Say, once for each reason, that a call is slower than it could be."""
    warnings.warn(
        f"ascend_ops.{operator} is computed by torch's operators, and not by {backend!r}: {reason}",
        UserWarning,
        stacklevel=2,
    )
