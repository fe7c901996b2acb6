"""swap-attention for models of megatron-core. Importing it imports megatron-core."""

from __future__ import annotations

from ascend_swap.integrations.megatron._options import add_swap_arguments, swap_by_options
from ascend_swap.integrations.megatron._spec import SwapBySpec, with_swapped_attention

__all__ = ["SwapBySpec", "add_swap_arguments", "swap_by_options", "with_swapped_attention"]
