"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import torch

import ascend_reuse_param

assert metadata.version("ascend-reuse-param") == ascend_reuse_param.__version__

weight = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
optimizer = ascend_reuse_param.reuse_param(torch.optim.AdamW([weight], lr=0.1))
weight.grad = torch.ones_like(weight)
optimizer.step()
assert (weight < 1).all()
assert optimizer.report()["residual_bytes"] == 200
