"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import ascend_ops

assert metadata.version("ascend-ops") == ascend_ops.__version__
