"""The version of ascend-swap."""

__version__ = "0.1.0"
