"""Reduce gradients while backward runs.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "DDPConfig": "ascend_ddp.config",
    "GradientReduction": "ascend_ddp.reduce",
    "ShardedConfig": "ascend_ddp.config",
    "ShardedOptimizer": "ascend_ddp.sharded",
    "__version__": "ascend_ddp._version",
    "join_state_dicts": "ascend_ddp.sharded",
    "reduce_gradients": "ascend_ddp.reduce",
    "shard_optimizer": "ascend_ddp.sharded",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_ddp._version import __version__ as __version__
    from ascend_ddp.config import DDPConfig as DDPConfig
    from ascend_ddp.config import ShardedConfig as ShardedConfig
    from ascend_ddp.reduce import GradientReduction as GradientReduction
    from ascend_ddp.reduce import reduce_gradients as reduce_gradients
    from ascend_ddp.sharded import ShardedOptimizer as ShardedOptimizer
    from ascend_ddp.sharded import join_state_dicts as join_state_dicts
    from ascend_ddp.sharded import shard_optimizer as shard_optimizer
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
