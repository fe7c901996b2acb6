"""The version of ascend-ddp."""

__version__ = "0.1.0"
