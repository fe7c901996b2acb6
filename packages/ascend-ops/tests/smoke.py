"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import torch
from torch import nn

import ascend_ops
from ascend_core import get_feature
from ascend_ops.nn import SwiGLU

assert metadata.version("ascend-ops") == ascend_ops.__version__

x = torch.randn(4, 8)
gate, up = x.chunk(2, -1)
torch.testing.assert_close(SwiGLU()(x), nn.functional.silu(gate) * up)

norm = nn.RMSNorm(8)
plain = norm(x)
handle = get_feature("fused-ops").apply(norm)
assert handle.report()["operators"] == {"rms_norm": 1}
torch.testing.assert_close(norm(x), plain)
handle.remove()
assert type(norm) is nn.RMSNorm
