"""Fused operators for models of megatron-core. Importing it imports megatron-core.

[Note: rotary embedding stays megatron-core's]
`SelfAttention.forward` calls the function `apply_rotary_pos_emb` of a module, which no spec names:
to compute it by `ascend_ops.rotary` would need a patch of megatron-core, or a copy of that forward.
"""

from __future__ import annotations

from ascend_ops.integrations.megatron._attention import AlibiCoreAttention
from ascend_ops.integrations.megatron._mlp import FusedSwiGLUMLP
from ascend_ops.integrations.megatron._norm import FusedRMSNorm
from ascend_ops.integrations.megatron._options import add_ops_arguments, ops_by_options
from ascend_ops.integrations.megatron._spec import with_fused_ops

__all__ = [
    "AlibiCoreAttention",
    "FusedRMSNorm",
    "FusedSwiGLUMLP",
    "add_ops_arguments",
    "ops_by_options",
    "with_fused_ops",
]
