"""The features that this package offers, as `ascend.features` entry points. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_recompute.config import RecomputeActivationConfig

__all__ = ["RECOMPUTE_ACTIVATION"]

RECOMPUTE_ACTIVATION = Feature(
    name="recompute-activation",
    summary=(
        "Rebuilds MLP activations when backward needs them: about half of an MLP's saved bytes "
        "for one more run of the activation function."
    ),
    config=RecomputeActivationConfig,
    verb="ascend_recompute.activation:recompute_activation",
    target="model",
)
