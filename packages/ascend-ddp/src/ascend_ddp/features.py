"""The feature that this package offers, as an `ascend.features` entry point. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_ddp.config import DDPConfig

__all__ = ["REDUCE_GRADIENTS"]

REDUCE_GRADIENTS = Feature(
    name="reduce-gradients",
    summary=(
        "Averages gradients over data-parallel ranks in buckets that leave while backward runs: "
        "saves the time of waiting for communication."
    ),
    config=DDPConfig,
    verb="ascend_ddp.reduce:reduce_gradients",
    target="model",
    needs_ranks=True,
)
