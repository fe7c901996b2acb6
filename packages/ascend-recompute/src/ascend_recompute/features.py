"""The features that this package offers, as `ascend.features` entry points. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)

__all__ = ["RECOMPUTE_ACTIVATION", "RECOMPUTE_LAYERS", "RECOMPUTE_NORM"]

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

RECOMPUTE_NORM = Feature(
    name="recompute-norm",
    summary=(
        "Rebuilds the outputs of LayerNorm and RMSNorm when backward needs them: two hidden "
        "states of each layer for one more run of its norms."
    ),
    config=RecomputeNormConfig,
    verb="ascend_recompute.norm:recompute_norm",
    target="model",
)

RECOMPUTE_LAYERS = Feature(
    name="recompute-layers",
    summary=(
        "Runs whole layers again in backward: all that they save but their inputs, for one more "
        "forward."
    ),
    config=RecomputeLayersConfig,
    verb="ascend_recompute.layers:recompute_layers",
    target="model",
)
