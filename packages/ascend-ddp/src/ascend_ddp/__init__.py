"""Will reduce gradients while backward still runs. Nothing is here yet."""

from ascend_ddp._version import __version__

__all__ = ["__version__"]
