"""Fused operators for transformer training: SwiGLU, RMSNorm, rotary embedding, ALiBi attention.

Importing this package imports no torch: every public name is imported when it is first read. The
operators as modules are in `ascend_ops.nn` (`from ascend_ops.nn import RMSNorm`), and the formulae
that they are held to in `ascend_ops.reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "FusedOpsConfig": "ascend_ops.config",
    "__version__": "ascend_ops._version",
    "alibi_attention": "ascend_ops.functional",
    "alibi_slopes": "ascend_ops.functional",
    "apply_fused_ops": "ascend_ops.apply",
    "backend_of": "ascend_ops.functional",
    "rms_norm": "ascend_ops.functional",
    "rotary": "ascend_ops.functional",
    "swiglu": "ascend_ops.functional",
    "swiglu_pair": "ascend_ops.functional",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_ops._version import __version__ as __version__
    from ascend_ops.apply import apply_fused_ops as apply_fused_ops
    from ascend_ops.config import FusedOpsConfig as FusedOpsConfig
    from ascend_ops.functional import alibi_attention as alibi_attention
    from ascend_ops.functional import alibi_slopes as alibi_slopes
    from ascend_ops.functional import backend_of as backend_of
    from ascend_ops.functional import rms_norm as rms_norm
    from ascend_ops.functional import rotary as rotary
    from ascend_ops.functional import swiglu as swiglu
    from ascend_ops.functional import swiglu_pair as swiglu_pair
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
