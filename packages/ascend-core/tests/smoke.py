"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import ascend_core

assert metadata.version("ascend-core") == ascend_core.__version__
assert ascend_core.discover() == {}, "core alone offers no feature"
for name in ascend_core.__all__:
    getattr(ascend_core, name)
