"""Will hold fused operators for transformer training. Nothing is here yet."""

from ascend_ops._version import __version__

__all__ = ["__version__"]
