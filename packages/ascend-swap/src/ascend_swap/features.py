"""The features that this package offers, as `ascend.features` entry points. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

__all__ = ["SWAP_ATTENTION", "SWAP_OPTIMIZER"]

SWAP_ATTENTION = Feature(
    name="swap-attention",
    summary=(
        "Keeps what attention saves for backward on the host, and brings it back a layer ahead: "
        "costs no time where a layer computes for longer than its copies take."
    ),
    config=SwapAttentionConfig,
    verb="ascend_swap.attention:swap_attention",
    target="model",
    moves_to_host=True,
)

SWAP_OPTIMIZER = Feature(
    name="swap-optimizer",
    summary=(
        "Keeps optimizer state on the host and brings it to the device a window at a time: all of "
        "it but three windows for a step that is as long as its copies."
    ),
    config=SwapOptimizerConfig,
    verb="ascend_swap.optimizer:swap_optimizer",
    target="optimizer",
    moves_to_host=True,
)
