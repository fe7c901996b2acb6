"""Runs out of memory inside a session, and prints what is said about it.

Usage: small_npu_session.py MODEL [NUMBER], where MODEL is `gpt`, of which so many layers run again,
`wide`, whose optimizer's state moves in so many windows, or `unknown`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn, optim

from ascend_recompute.config import RecomputeLayersConfig, RecomputeNormConfig
from ascend_suite.applying import apply
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.plan import Plan
from ascend_swap.config import SwapOptimizerConfig

NUMBER = int(sys.argv[2]) if sys.argv[2:] else None


def gpt() -> None:
    """The demo's model, with activations that do not fit."""
    plan = Plan({"recompute-norm": RecomputeNormConfig()})
    if NUMBER is not None:
        plan = Plan({"recompute-layers": RecomputeLayersConfig(num_layers=NUMBER)})
    train(plan, GPTConfig(dropout=0.0), torch.randint(256, (8, 257)))


def wide() -> None:
    """Its weights and gradients fit, and the optimizer's state does not."""
    plan = Plan({"recompute-norm": RecomputeNormConfig()})
    if NUMBER is not None:
        plan = Plan({"swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=NUMBER)})
    train(plan, GPTConfig(hidden=640, dropout=0.0), torch.randint(256, (1, 33)))


def train(plan: Plan, config: GPTConfig, tokens: torch.Tensor) -> None:
    """Make three steps; say how far they came."""
    model = GPT(config).to("npu")
    tokens = tokens.to("npu")
    with apply(plan, model, optim.AdamW(model.parameters())) as session:
        for _ in range(3):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            sys.stdout.write("backward\n")
            assert session.optimizer is not None
            session.optimizer.step()
            session.optimizer.zero_grad()
    sys.stdout.write("trained\n")


def unknown() -> None:
    """A model whose shape cannot be read off."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to("npu")
    with apply(Plan({"recompute-norm": RecomputeNormConfig()}), model):
        model(torch.zeros(1 << 30, 8, device="npu"))


try:
    {"gpt": gpt, "wide": wide, "unknown": unknown}[sys.argv[1]]()
except torch.OutOfMemoryError as error:
    sys.stdout.write("\n".join(["out of memory", *error.__notes__]) + "\n")
