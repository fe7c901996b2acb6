"""Conditions that rules of several subjects share. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.predicate import All, AnyOf, Option

__all__ = [
    "FULL_RECOMPUTE",
    "GRAPHS",
    "MEGATRON_FSDP",
    "MOVING",
    "ON_MEGATRON",
    "OPTIMIZER_FEATURES",
    "REBUILDING",
    "SAVED_TENSOR_FEATURES",
    "training",
]

REBUILDING = ("recompute-activation", "recompute-norm")
"""Features that rebuild single values."""

SAVED_TENSOR_FEATURES = (*REBUILDING, "recompute-layers", "swap-attention")
"""Features that change what autograd saves."""

MOVING = ("swap-attention", "swap-optimizer")
"""Features that move memory to the host."""

OPTIMIZER_FEATURES = ("swap-optimizer", "reuse-fp32-param", "shard-optimizer")
"""Features that stand around the optimizer."""


def training(name: str) -> Option:
    """The option of training of this name."""
    return Option(f"training.{name}")


ON_MEGATRON = training("framework").equals("megatron-core")

FULL_RECOMPUTE = training("recompute_granularity").equals("full")

MEGATRON_FSDP = AnyOf(
    training("use_megatron_fsdp").equals(True), training("use_custom_fsdp").equals(True)
)

GRAPHS = AnyOf(
    training("graph_capture").equals(True),
    training("enable_cuda_graph").equals(True),
    training("external_cuda_graph").equals(True),
    All(training("cuda_graph_impl").differs("none"), training("cuda_graph_impl").differs(None)),
)
