"""The version of ascend-core."""

__version__ = "0.1.0"
