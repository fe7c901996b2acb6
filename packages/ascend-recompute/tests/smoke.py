"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

from importlib import metadata

import torch

import ascend_recompute
from ascend_core import get_feature

assert metadata.version("ascend-recompute") == ascend_recompute.__version__


def weight_gradients(*, recompute: bool) -> list[torch.Tensor]:
    """Train a gelu MLP for one step and return its gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    if recompute:
        get_feature("recompute-activation").apply(model)
    model(torch.randn(4, 8)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


plain, rebuilt = weight_gradients(recompute=False), weight_gradients(recompute=True)
assert len(plain) == len(rebuilt) == 4
assert all(torch.equal(a, b) for a, b in zip(plain, rebuilt, strict=True))
