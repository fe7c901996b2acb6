"""The operators as modules: `from ascend_ops.nn import RMSNorm`. Imports torch.

Each module asks for a backend with every call, as the operator does, so that it works on whatever
device it is moved to. What is computed in FP32 (an offset of 1, a phase, a slope) is not rounded by
`model.bfloat16()`, and nothing is in the state dict but what is learned.
"""

from ascend_ops.nn._alibi import AlibiAttention
from ascend_ops.nn._rms_norm import RMSNorm
from ascend_ops.nn._rotary import RotaryEmbedding
from ascend_ops.nn._swiglu import SwiGLU

__all__ = ["AlibiAttention", "RMSNorm", "RotaryEmbedding", "SwiGLU"]
