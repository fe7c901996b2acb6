"""The formulae: plain torch, in FP32 (FP64 where it is given FP64) and rounded once at the end.

This is what the operators are held to, and what one reads to know what they compute. Autograd
differentiates it. It is slow and saves much.
"""

from ascend_ops.reference._alibi import alibi_attention, alibi_bias, alibi_lse
from ascend_ops.reference._precision import wide
from ascend_ops.reference._rms_norm import rms_norm
from ascend_ops.reference._rotary import rotary
from ascend_ops.reference._swiglu import swiglu, swiglu_pair

__all__ = [
    "alibi_attention",
    "alibi_bias",
    "alibi_lse",
    "rms_norm",
    "rotary",
    "swiglu",
    "swiglu_pair",
    "wide",
]
