"""Recompute for models of megatron-core. Importing it imports megatron-core."""

from __future__ import annotations

from ascend_core.integrations.megatron import random_states
from ascend_recompute.integrations.megatron._mlp import with_visible_activation
from ascend_recompute.integrations.megatron._options import MegatronRecompute, recompute_by_options

__all__ = ["MegatronRecompute", "random_states", "recompute_by_options", "with_visible_activation"]
