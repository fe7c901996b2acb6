"""Which kernels split, join and step here."""

from __future__ import annotations

import torch

from ascend_reuse_param._bits import Codec, Rounding
from ascend_reuse_param._kernels.eager import EagerCodec

__all__ = ["chosen_codec"]


def chosen_codec(kernels: str, rounding: Rounding, device: torch.device) -> Codec:
    """The codec that a config asks for."""
    return EagerCodec(device, rounding)
