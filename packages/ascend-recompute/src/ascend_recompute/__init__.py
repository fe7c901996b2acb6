"""Rebuild activations just before backward needs them, instead of keeping them.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "__version__": "ascend_recompute._version",
    "CheckpointChain": "ascend_recompute.without_output",
    "CheckpointWithoutOutput": "ascend_recompute.without_output",
    "FusedActivation": "ascend_recompute.fused",
    "Policy": "ascend_recompute.policy",
    "RecomputeActivationConfig": "ascend_recompute.config",
    "RecomputeLayersConfig": "ascend_recompute.config",
    "RecomputeNormConfig": "ascend_recompute.config",
    "RecomputePlan": "ascend_recompute.plan",
    "rebuild_region": "ascend_recompute.activation",
    "recompute_activation": "ascend_recompute.activation",
    "recompute_layers": "ascend_recompute.layers",
    "recompute_norm": "ascend_recompute.norm",
    "recompute_to_fit": "ascend_recompute.fit",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_recompute._version import __version__ as __version__
    from ascend_recompute.activation import rebuild_region as rebuild_region
    from ascend_recompute.activation import recompute_activation as recompute_activation
    from ascend_recompute.config import RecomputeActivationConfig as RecomputeActivationConfig
    from ascend_recompute.config import RecomputeLayersConfig as RecomputeLayersConfig
    from ascend_recompute.config import RecomputeNormConfig as RecomputeNormConfig
    from ascend_recompute.fit import recompute_to_fit as recompute_to_fit
    from ascend_recompute.fused import FusedActivation as FusedActivation
    from ascend_recompute.layers import recompute_layers as recompute_layers
    from ascend_recompute.norm import recompute_norm as recompute_norm
    from ascend_recompute.plan import RecomputePlan as RecomputePlan
    from ascend_recompute.policy import Policy as Policy
    from ascend_recompute.without_output import CheckpointChain as CheckpointChain
    from ascend_recompute.without_output import CheckpointWithoutOutput as CheckpointWithoutOutput
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
