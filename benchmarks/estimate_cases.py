"""Shapes drawn from a seed, plans, and their measured peaks: what `estimate` is held against."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from ascend_core.memory import measure_peak
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite.applying import apply
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.plan import Plan
from ascend_suite.session import Session
from ascend_suite.shape import ModelShape
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

__all__ = ["FLOPS", "draw_shapes", "measured_peak", "plans_for"]

FLOPS = {"float32": 1e10, "bfloat16": 2.5e9}
"""What a micro-batch may cost at most: two cores have to do it, and are slower at BF16."""
STEPS = 2
"""The first step makes the optimizer's state, the second is as all others are."""

_ACTIVATION, _NORM = RecomputeActivationConfig(), RecomputeNormConfig()
_REBUILD = {"recompute-activation": _ACTIVATION, "recompute-norm": _NORM}


def draw_shapes(seed: int, count: int) -> Iterator[ModelShape]:
    """Draw models and their training: layers, width, heads, sequence, dtype and the rest."""
    dice = random.Random(seed)
    while count:
        heads = dice.choice((1, 2, 4, 8))
        hidden = heads * dice.choice([k for k in (16, 32, 64, 128) if 64 <= heads * k <= 512])
        layers, seq = dice.randint(2, 8), 32 * dice.randint(2, 16)
        dtype = dice.choice(("float32", "bfloat16"))
        affordable = int(FLOPS[dtype] / (6 * 16 * layers * hidden**2 * seq))
        if not affordable:
            continue
        count -= 1
        yield ModelShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq=seq,
            vocab=dice.choice((256, 512, 1000)),
            micro_batch=dice.randint(1, min(16, affordable)),
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
        session = _train(shape, plan, torch.device(device))
    session.remove()
    return memory.peak_bytes


def _train(shape: ModelShape, plan: Plan, device: torch.device) -> Session:
    """Train, with the plan's features on; they are when this returns."""
    torch.manual_seed(0)
    model = GPT(_config(shape)).to(getattr(torch, shape.dtype)).to(device)
    session = apply(plan, model, optim.AdamW(model.parameters(), lr=1e-3))
    optimizer: Any = session.optimizer
    if shape.masters and not {"reuse-fp32-param", "swap-optimizer"} & set(plan.features):
        optimizer = BesideWeights(model)
    batches = [_batch(shape, device) for _ in range(shape.micro_batches)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for tokens, targets in batches:
            (model.loss(tokens, targets) / len(batches)).backward()
        optimizer.step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return session


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
