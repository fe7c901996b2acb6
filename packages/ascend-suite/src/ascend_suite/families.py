"""The plans that `suggest` looks at. Imports no torch.

[Note: families of plans]
A plan is a way to treat activations and a way to treat the optimizer's state. One choice of the
first has a dial: how many layers run again. Each turn of it saves bytes and costs time, so the
first turn that fits is the cheapest of its family; it is found by halving. Features that do not
promise the plain run's bits (fused-ops) are looked at where they are asked for alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_ops.config import FusedOpsConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite.estimation.hardware import DeviceKind
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

__all__ = ["Family", "families"]

_WINDOWS = (None, 128)
"""Numbers of windows of swap-optimizer: its default, and one where its step would be the peak."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Plans that differ in how many layers run again.

    Attributes:
        features: What all of them have on.
        training: What is known of the training.
        turns: How far the dial goes.
    """

    features: dict[str, Any]
    training: dict[str, object]
    turns: int

    def plan(self, turn: int) -> Plan:
        """The plan in which so many layers run again."""
        features = dict(self.features)
        if turn:
            features["recompute-layers"] = RecomputeLayersConfig(num_layers=turn)
        return Plan(features, self.training)


def families(shape: ModelShape, device: DeviceKind, *, bitwise: bool = True) -> Iterator[Family]:
    """The families for a shape, plain first.

    Args:
        shape: The model and its training.
        device: The kind of device.
        bitwise: Whether all of them are to train to the plain run's bits.
    """
    layers = shape.layers // shape.pp
    known = training_of(shape)
    for operators in [{}] if bitwise else [{}, *_operators(shape)]:
        for state in _states(shape, device):
            for kept in _activations(device):
                # A last layer that runs again takes as much in its backward as before, or more.
                turns = layers - 1 if kept else layers
                yield Family({**operators, **state, **kept}, known, turns)


def _operators(shape: ModelShape) -> Iterator[dict[str, Any]]:
    """fused-ops, with the operators that the model has a use for."""
    uses = {"swiglu": shape.activation == "swiglu", "rms_norm": shape.norm == "rms"}
    operators = tuple(name for name, used in uses.items() if used)
    if operators:
        yield {"fused-ops": FusedOpsConfig(operators=operators)}


def training_of(shape: ModelShape) -> dict[str, object]:
    """What a shape says of the training, by megatron-core's names."""
    return {
        "num_layers": shape.layers,
        "bf16": shape.dtype == "bfloat16",
        "tensor_model_parallel_size": shape.tp,
        "pipeline_model_parallel_size": shape.pp,
        "context_parallel_size": shape.cp,
        "data_parallel_size": shape.dp,
        "sequence_parallel": shape.sequence_parallel,
    }


def _activations(device: DeviceKind) -> Iterator[dict[str, Any]]:
    activation = {"recompute-activation": RecomputeActivationConfig()}
    norm = {"recompute-norm": RecomputeNormConfig()}
    rebuilds: tuple[dict[str, Any], ...] = ({}, activation, norm, {**activation, **norm})
    for rebuilt in rebuilds:
        yield rebuilt
        if device != "cpu":
            yield {**rebuilt, "swap-attention": SwapAttentionConfig()}


def _states(shape: ModelShape, device: DeviceKind) -> Iterator[dict[str, Any]]:
    """Ways to treat the optimizer's state, without the gradients' and with them."""
    masters = shape.masters and shape.dtype == "bfloat16"
    kinds: list[dict[str, Any]] = [{}]
    if masters:
        kinds.append({"reuse-fp32-param": ReuseParamConfig()})
    if device != "cpu" and shape.optimizer != "sgd":
        for times in _WINDOWS:
            config = SwapOptimizerConfig(swap_optimizer_times=times, master_weights=masters)
            kinds.append({"swap-optimizer": config})
    if shape.dp == 1:
        yield from kinds
        return
    whole = {"reduce-gradients": DDPConfig()}
    yield {}
    yield from ({**whole, **kind} for kind in kinds)
    shards = {
        "reduce-gradients": DDPConfig(mode="reduce-scatter"),
        "shard-optimizer": ShardedConfig(),
    }
    yield from ({**shards, **kind} for kind in kinds)
