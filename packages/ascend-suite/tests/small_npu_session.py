"""Runs out of memory inside a session, and prints what is said about it.

Usage: small_npu_session.py MODEL [LAYERS], where MODEL is `gpt` or `unknown`, and so many layers of
`gpt` run again.
"""

from __future__ import annotations

import sys

import torch
from torch import nn, optim

from ascend_recompute.config import RecomputeLayersConfig, RecomputeNormConfig
from ascend_suite.applying import apply
from ascend_suite.demo.gpt import GPT, GPTConfig
from ascend_suite.plan import Plan


def gpt() -> None:
    """The demo's model, with activations that do not fit."""
    model = GPT(GPTConfig(dropout=0.0)).to("npu")
    optimizer = optim.AdamW(model.parameters())
    tokens = torch.randint(256, (8, 257)).to("npu")
    plan = Plan({"recompute-norm": RecomputeNormConfig()})
    if sys.argv[2:]:
        plan = Plan({"recompute-layers": RecomputeLayersConfig(num_layers=int(sys.argv[2]))})
    with apply(plan, model, optimizer) as session:
        for _ in range(3):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            assert session.optimizer is not None
            session.optimizer.step()
    sys.stdout.write("trained\n")


def unknown() -> None:
    """A model whose shape cannot be read off."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to("npu")
    with apply(Plan({"recompute-norm": RecomputeNormConfig()}), model):
        model(torch.zeros(1 << 30, 8, device="npu"))


try:
    {"gpt": gpt, "unknown": unknown}[sys.argv[1]]()
except torch.OutOfMemoryError as error:
    sys.stdout.write("\n".join(["out of memory", *error.__notes__]) + "\n")
