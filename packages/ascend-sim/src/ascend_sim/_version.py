"""The version of ascend-sim."""

__version__ = "0.1.0"
