"""Which kernels split, join and step on a device."""

from __future__ import annotations

import warnings

import torch
from torch import optim

from ascend_core.errors import ConfigError, UnavailableError
from ascend_core.optim import Kernel
from ascend_core.optim.rules import unhooked_step
from ascend_reuse_param._adamw import AdamWKernel
from ascend_reuse_param._bits import Codec, Rounding
from ascend_reuse_param._kernels.compiled import CompiledCodec
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.native import NativeCodec
from ascend_reuse_param._kernels.native_adamw import NativeAdamW
from ascend_reuse_param._masters import SplitMasters

__all__ = ["chosen_codec", "chosen_kernel"]

_DEVICES = {"native": ("cpu",), "compiled": ("cpu", "cuda")}


def chosen_codec(kernels: str, rounding: Rounding, device: torch.device) -> Codec:
    """The codec that a config asks for.

    Raises:
        ConfigError: When it is not for this device.
        UnavailableError: When it was asked for by name, and cannot be had here.
    """
    if device.type not in _DEVICES.get(kernels, (device.type,)):
        raise ConfigError(
            f"kernels is {kernels!r}, and the parameters are on {device}.",
            why=f"these kernels are for {' and '.join(_DEVICES[kernels])}.",
            instead="leave kernels out.",
        )
    if kernels == "native":
        return NativeCodec(rounding)
    if kernels == "compiled":
        return CompiledCodec(device, rounding)
    if kernels == "auto" and device.type == "cpu":
        try:
            return NativeCodec(rounding)
        except UnavailableError as error:
            _warn(error)
    return EagerCodec(device, rounding)


def chosen_kernel(
    codec: Codec, kind: type[optim.Optimizer], masters: SplitMasters
) -> Kernel | None:
    """The step in one pass that belongs to a codec and an optimizer, if there is one."""
    is_adam = unhooked_step(kind) is unhooked_step(optim.Adam)
    if not (is_adam and isinstance(codec, NativeCodec)):
        return None
    try:
        return AdamWKernel(NativeAdamW(codec.rounding, library=codec.library), masters.parts)
    except UnavailableError as error:
        _warn(error)
        return None


def _warn(error: UnavailableError) -> None:
    warnings.warn(
        f"reuse_param steps more slowly, to the same bits: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
