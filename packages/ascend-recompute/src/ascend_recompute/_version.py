"""The version of ascend-recompute."""

__version__ = "0.1.0"
