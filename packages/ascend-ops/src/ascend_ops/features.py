"""The feature that this package offers, as an `ascend.features` entry point. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_ops.config import FusedOpsConfig

__all__ = ["FUSED_OPS"]

FUSED_OPS = Feature(
    name="fused-ops",
    summary=(
        "Computes gated MLPs' SwiGLU and RMSNorm by one operator each: faster, and they save their "
        "inputs alone. Equal to rounding, not to the bit."
    ),
    config=FusedOpsConfig,
    verb="ascend_ops.apply:apply_fused_ops",
    target="model",
    bitwise=False,
)
