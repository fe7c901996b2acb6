"""Shapes drawn from a seed, plans, and their measured peaks: what `estimate` is held against."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from ascend_core.feature import get_feature
from ascend_core.memory import measure_peak
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

__all__ = ["FLOPS", "draw_shapes", "measured_peak", "plans_for"]

FLOPS = 1.2e10
"""What a micro-batch may cost, where one sequence does not cost more: two cores have to do it."""
STEPS = 2
"""The first step makes the optimizer's state, the second is as all others are."""

_ACTIVATION, _NORM = RecomputeActivationConfig(), RecomputeNormConfig()
_REBUILD = {"recompute-activation": _ACTIVATION, "recompute-norm": _NORM}


def draw_shapes(seed: int, count: int) -> Iterator[ModelShape]:
    """Draw models and their training: layers, width, heads, sequence, dtype and the rest."""
    dice = random.Random(seed)
    for _ in range(count):
        heads = dice.choice((1, 2, 4, 8))
        hidden = heads * dice.choice([k for k in (16, 32, 64, 128) if 64 <= heads * k <= 512])
        layers, seq = dice.randint(2, 8), 32 * dice.randint(2, 16)
        dtype = dice.choice(("float32", "bfloat16"))
        cost = 6 * 16 * layers * hidden**2 * seq
        yield ModelShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq=seq,
            vocab=dice.choice((256, 512, 1000)),
            micro_batch=dice.randint(1, max(1, min(16, int(FLOPS / cost)))),
            micro_batches=dice.choice((1, 1, 2)),
            activation=dice.choice(("swiglu", "gelu")),
            norm=dice.choice(("rms", "layer")),
            tied=False,
            dropout=dice.random() < 0.5,
            dtype=dtype,
            masters=dtype == "bfloat16" and dice.random() < 0.5,
        )


def plans_for(shape: ModelShape, device: str) -> dict[str, Plan]:
    """The plans that are tried on a shape, by what is written in the table."""
    half = RecomputeLayersConfig(num_layers=-(-shape.layers // 2))
    plans: dict[str, dict[str, Any]] = {
        "plain": {},
        "activation": {"recompute-activation": _ACTIVATION},
        "norm": {"recompute-norm": _NORM},
        "activation, norm": _REBUILD,
        "layers": {"recompute-layers": RecomputeLayersConfig()},
        "half of the layers, activation, norm": {"recompute-layers": half, **_REBUILD},
    }
    if shape.activation == "swiglu" or shape.norm == "rms":
        plans["fused-ops"] = {"fused-ops": FusedOpsConfig()}
    if device != "cpu":
        swap = SwapAttentionConfig(min_bytes=1, keep_last=1)
        windows = SwapOptimizerConfig(master_weights=shape.masters)
        plans = {
            "plain": {},
            "swap-attention": {"swap-attention": swap},
            "swap-attention, activation, norm": {"swap-attention": swap, **_REBUILD},
            "swap-optimizer": {"swap-optimizer": windows},
            "swap-optimizer, layers": {
                "swap-optimizer": windows,
                "recompute-layers": RecomputeLayersConfig(),
            },
            "swap-optimizer, swap-attention": {"swap-optimizer": windows, "swap-attention": swap},
        }
    if shape.masters:
        reuse = {"reuse-fp32-param": ReuseParamConfig()}
        plans["reuse-fp32-param"] = reuse
        plans["reuse-fp32-param, activation, norm"] = {**reuse, **_REBUILD}
    return {name: Plan(features) for name, features in plans.items()}


def measured_peak(shape: ModelShape, plan: Plan, device: str) -> int:
    """Train the demo's model for some steps.

    Returns:
        The most bytes that the device held, the model's construction and the batches included.
    """
    gc.collect()
    with measure_peak(device) as memory:
        handles = _train(shape, plan, torch.device(device))
    for handle in handles:
        handle.remove()
    return memory.peak_bytes


def _train(shape: ModelShape, plan: Plan, device: torch.device) -> list[Any]:
    """Train, and return the handles of what is on."""
    torch.manual_seed(0)
    model = GPT(_config(shape)).to(getattr(torch, shape.dtype)).to(device)
    features = {name: get_feature(name) for name in plan.features}
    handles = [
        feature.apply(model, plan.features[name])
        for name, feature in features.items()
        if feature.target == "model"
    ]
    plain = optim.AdamW(model.parameters(), lr=1e-3)
    steps = [f for name, f in features.items() if f.target == "optimizer"]
    optimizer: Any = plain
    for feature in steps:
        optimizer = feature.apply(plain, plan.features[feature.name])
    if shape.masters and not steps:
        optimizer = BesideWeights(model)
    batches = [_batch(shape, device) for _ in range(shape.micro_batches)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for tokens, targets in batches:
            (model.loss(tokens, targets) / len(batches)).backward()
        optimizer.step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return [*([optimizer] if steps else []), *handles]


class BesideWeights:
    """AdamW on FP32 masters beside BF16 weights, as mixed-precision training is written by hand."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._optimizer = optim.AdamW(self._masters, lr=1e-3)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with FP32 gradients, and round them into the weights."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)


def _batch(shape: ModelShape, device: torch.device) -> tuple[Tensor, Tensor]:
    size = (shape.micro_batch, shape.seq)
    tokens, targets = (torch.randint(shape.vocab, size).to(device) for _ in range(2))
    return tokens, targets


def _config(shape: ModelShape) -> GPTConfig:
    options: Mapping[str, Any] = {
        name: getattr(shape, name)
        for name in ("layers", "hidden", "heads", "seq", "activation", "norm")
    }
    return GPTConfig(vocabulary=shape.vocab, dropout=0.1 if shape.dropout else 0.0, **options)
