"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import ascend_ddp

assert metadata.version("ascend-ddp") == ascend_ddp.__version__
