"""All packages of the suite in one, and the command that shows what they do.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from ascend_suite._version import __version__ as __version__

__all__ = ["__version__"]
