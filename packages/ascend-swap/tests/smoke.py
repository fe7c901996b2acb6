"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import torch

import ascend_swap

assert metadata.version("ascend-swap") == ascend_swap.__version__

weight = torch.nn.Parameter(torch.ones(100))
optimizer = ascend_swap.swap_optimizer(torch.optim.AdamW([weight]))
weight.grad = torch.ones(100)
optimizer.step()
assert (weight < 1).all()
assert optimizer.state[weight]["exp_avg"].shape == (100,)
