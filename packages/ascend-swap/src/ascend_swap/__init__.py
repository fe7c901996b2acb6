"""Keep on the host what training needs only now and then, and bring it back in time.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "AttentionSwap": "ascend_swap.attention",
    "SwapAttentionConfig": "ascend_swap.config",
    "SwapOptimizerConfig": "ascend_swap.config",
    "__version__": "ascend_swap._version",
    "swap_attention": "ascend_swap.attention",
    "swap_optimizer": "ascend_swap.optimizer",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_swap._version import __version__ as __version__
    from ascend_swap.attention import AttentionSwap as AttentionSwap
    from ascend_swap.attention import swap_attention as swap_attention
    from ascend_swap.config import SwapAttentionConfig as SwapAttentionConfig
    from ascend_swap.config import SwapOptimizerConfig as SwapOptimizerConfig
    from ascend_swap.optimizer import swap_optimizer as swap_optimizer
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
