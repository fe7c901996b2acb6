"""The version of ascend-reuse-param."""

__version__ = "0.1.0"
