"""Ascend NPUs. The only module of this package that imports torch_npu, and not before it must."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Mapping

from ascend_core._backends._accelerator import AcceleratorBackend

__all__ = ["NpuBackend"]


@functools.cache
def _import_failure() -> str | None:
    """Import torch_npu, which makes `torch.npu`; say why it could not be.

    The answer is kept: an import that failed half-way has already registered the device type, so
    a second attempt would fail for another, misleading reason.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed."
    try:
        importlib.import_module("torch_npu")
    # A missing CANN shows as an OSError or ImportError, a wrong version as a RuntimeError.
    except Exception as error:
        return f"torch_npu is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


@dataclasses.dataclass(frozen=True)
class NpuBackend(AcceleratorBackend):
    """The accelerator backend, for `torch.npu`."""

    name: str = "npu"

    def unavailable_because(self) -> str | None:
        """Say why there is no NPU; nothing when there is. Imports torch_npu if it is there."""
        return _import_failure() or super().unavailable_because()

    def capabilities(self) -> Mapping[str, bool | str]:
        """Return what the current device can do."""
        torch_npu = importlib.import_module("torch_npu")
        return {
            **super().capabilities(),
            "fused_attention": hasattr(torch_npu, "npu_fusion_attention"),
            "fused_rms_norm": hasattr(torch_npu, "npu_rms_norm"),
            "fused_rotary": hasattr(torch_npu, "npu_rotary_mul"),
            "fused_swiglu": hasattr(torch_npu, "npu_swiglu"),
        }
