"""The version of ascend-suite."""

__version__ = "0.1.0"
