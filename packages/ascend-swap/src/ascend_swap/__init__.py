"""Will move attention activations and optimizer state to the host. Nothing is here yet."""

from ascend_swap._version import __version__

__all__ = ["__version__"]
