"""The features that this package offers, as `ascend.features` entry points. Imports no torch."""

from __future__ import annotations

from ascend_core.feature import Feature
from ascend_ddp.config import DDPConfig, ShardedConfig

__all__ = ["REDUCE_GRADIENTS", "SHARD_OPTIMIZER"]

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

SHARD_OPTIMIZER = Feature(
    name="shard-optimizer",
    summary=(
        "Divides the optimizer's state and its step among the data-parallel ranks, which gather "
        "the weights while the next forward runs: state / ranks, for no more communication."
    ),
    config=ShardedConfig,
    verb="ascend_ddp.sharded:shard_optimizer",
    target="optimizer",
    needs_ranks=True,
    takes="reduce-gradients",
    wraps=True,
)
