"""What the operators of torch_npu have in common: where they are, and what they take."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ascend_core.errors import UnavailableError

__all__ = ["operators", "refusal_of"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operators() -> Any:
    """Return the operators of torch_npu, the namespace `torch.ops.npu`.

    torch_npu's Python functions are not used, since these operators run below autograd anyway.

    Raises:
        UnavailableError: When torch_npu cannot be imported.
    """
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise UnavailableError(
            "torch_npu cannot be imported.",
            why=str(error),
            instead="install it and CANN, or leave backend='npu' out.",
        ) from error
    return torch.ops.npu


def refusal_of(**tensors: Tensor | None) -> str | None:
    """Why none of torch_npu's operators takes these; None where one may."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device.type != "npu":
            return f"{name} is on {tensor.device}, which is no NPU."
        if tensor.dtype not in _DTYPES:
            return f"{name} is {tensor.dtype}, and the operators take FP32, BF16 and FP16."
    return None
