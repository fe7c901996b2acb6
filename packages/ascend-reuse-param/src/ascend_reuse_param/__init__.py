"""Keep a BF16 parameter and its FP32 master in the same bits.

Importing this package imports no torch: every public name is imported when it is first read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_core._lazy import lazy_exports

# The one list of public names: each with the module that defines it.
_EXPORTS = {
    "ReuseParamConfig": "ascend_reuse_param.config",
    "__version__": "ascend_reuse_param._version",
    "reuse_param": "ascend_reuse_param.optimizer",
}

__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from ascend_reuse_param._version import __version__ as __version__
    from ascend_reuse_param.config import ReuseParamConfig as ReuseParamConfig
    from ascend_reuse_param.optimizer import reuse_param as reuse_param
else:
    __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
