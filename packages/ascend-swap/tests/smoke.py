"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import ascend_swap

assert metadata.version("ascend-swap") == ascend_swap.__version__
