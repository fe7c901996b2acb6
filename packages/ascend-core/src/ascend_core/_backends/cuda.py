"""CUDA GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ascend_core._backends._accelerator import AcceleratorBackend

__all__ = ["CudaBackend"]


@dataclasses.dataclass(frozen=True)
class CudaBackend(AcceleratorBackend):
    """The accelerator backend, for `torch.cuda`."""

    name: str = "cuda"

    def capabilities(self) -> Mapping[str, bool | str]:
        """Return what the current device can do."""
        return {
            **super().capabilities(),
            "fused_attention": True,
            "fused_rms_norm": True,
            "fused_rotary": False,
            "fused_swiglu": False,
        }
