"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import ascend_reuse_param

assert metadata.version("ascend-reuse-param") == ascend_reuse_param.__version__
