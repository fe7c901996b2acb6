"""The operators as functions. Each checks what it is given, and calls its operator of torch."""

from ascend_ops.functional._alibi import alibi_attention, alibi_slopes
from ascend_ops.functional._backend import backend_of
from ascend_ops.functional._rms_norm import rms_norm
from ascend_ops.functional._rotary import rotary
from ascend_ops.functional._swiglu import swiglu, swiglu_pair

__all__ = [
    "alibi_attention",
    "alibi_slopes",
    "backend_of",
    "rms_norm",
    "rotary",
    "swiglu",
    "swiglu_pair",
]
