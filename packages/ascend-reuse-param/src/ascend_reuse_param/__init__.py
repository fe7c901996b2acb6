"""Will keep a BF16 parameter and its FP32 master in the same bits. Nothing is here yet."""

from ascend_reuse_param._version import __version__

__all__ = ["__version__"]
