"""The feature that this package offers, as an `ascend.features` entry point. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_reuse_param.config import ReuseParamConfig

__all__ = ["REUSE_PARAM"]

REUSE_PARAM = Feature(
    name="reuse-fp32-param",
    summary=(
        "Keeps the FP32 master of a BF16 weight in the weight's own bits and 16 more: 2 bytes per "
        "parameter less, for the splitting and joining in each step."
    ),
    config=ReuseParamConfig,
    verb="ascend_reuse_param.optimizer:reuse_param",
    target="optimizer",
    needs_bf16=True,
)
