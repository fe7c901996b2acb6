"""Which kernels split, join and step on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import optim

from ascend_core.errors import ConfigError, UnavailableError
from ascend_core.optim import Kernel
from ascend_core.optim.rules import unhooked_step
from ascend_reuse_param._adamw import AdamWKernel, Form
from ascend_reuse_param._bits import Codec, Rounding
from ascend_reuse_param._kernels.adamw import AdamWStep
from ascend_reuse_param._kernels.compiled import CompiledCodec
from ascend_reuse_param._kernels.eager import EagerCodec
from ascend_reuse_param._kernels.native import NativeCodec
from ascend_reuse_param._kernels.native_adamw import NativeAdamW
from ascend_reuse_param._kernels.triton_adamw import TritonAdamW
from ascend_reuse_param._kernels.triton_codec import TritonCodec
from ascend_reuse_param._masters import SplitMasters

__all__ = ["chosen_codec", "chosen_kernel"]

_DEVICES = {"native": ("cpu",), "triton": ("cuda",), "compiled": ("cpu", "cuda")}


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
    if kernels == "triton":
        return TritonCodec(device, rounding)
    if kernels == "compiled":
        return CompiledCodec(device, rounding)
    if kernels == "auto":
        try:
            return _fastest_codec(rounding, device)
        except UnavailableError as error:
            _warn(error)
    return EagerCodec(device, rounding)


def _fastest_codec(rounding: Rounding, device: torch.device) -> Codec:
    if device.type == "cpu":
        return NativeCodec(rounding)
    if device.type == "cuda":
        return TritonCodec(device, rounding)
    return EagerCodec(device, rounding)


def chosen_kernel(
    codec: Codec, kind: type[optim.Optimizer], masters: SplitMasters
) -> Kernel | None:
    """The step in one pass that belongs to a codec and an optimizer, if there is one."""
    if unhooked_step(kind) is not unhooked_step(optim.Adam):
        return None
    steps: dict[Form, AdamWStep] = {}
    for forms, make in _makers(codec):
        try:
            step = make()
        except UnavailableError as error:
            _warn(error)
        else:
            steps.update(dict.fromkeys(forms, step))
    return AdamWKernel(steps, masters.parts) if steps else None


def _makers(codec: Codec) -> Iterator[tuple[tuple[Form, ...], Callable[[], AdamWStep]]]:
    """What makes the steps that belong to a codec, and of which forms of torch each is."""
    if isinstance(codec, NativeCodec):  # on a CPU the two forms are equal
        yield ("for-loop", "foreach"), partial(NativeAdamW, codec.rounding, library=codec.library)
    if isinstance(codec, TritonCodec):
        yield ("for-loop",), partial(TritonAdamW, codec, foreach=False)
        yield ("foreach",), partial(TritonAdamW, codec, foreach=True)


def _warn(error: UnavailableError) -> None:
    warnings.warn(
        f"reuse_param steps more slowly, to the same bits: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
