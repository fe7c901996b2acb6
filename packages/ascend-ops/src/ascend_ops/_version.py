"""The version of ascend-ops."""

__version__ = "0.1.0"
