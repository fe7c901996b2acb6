"""What a plan does to each layer of a stage. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from ascend_suite.estimation.hardware import DeviceKind
from ascend_suite.plan import Plan

__all__ = ["FEATURES", "PLAIN", "Treatment", "treatments"]

FEATURES = (
    "swap-attention", "swap-optimizer", "recompute-activation", "recompute-norm",
    "recompute-layers", "reuse-fp32-param", "fused-ops", "reduce-gradients", "shard-optimizer",
)  # fmt: skip
"""The features that an estimate can count."""

_SWAPPED = ("input_norm", "self_attention", "post_attention_norm")


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What is done to what one layer saves.

    Attributes:
        replays: Whether the layer runs again: its input alone is held.
        depth: Its position in a group of layers that run again together; only the first holds an
            input, and what those before it save is there in its backward.
        rebuilds: The features that rebuild single values of it.
        moves: The modules whose saved values are on the host between forward and backward.
        replays_mlp: Whether its MLP runs again, as swap-attention can ask for.
        min_bytes: The smallest value that moves.
    """

    replays: bool = False
    depth: int = 0
    rebuilds: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    replays_mlp: bool = False
    min_bytes: int = 1


PLAIN = Treatment()


def treatments(plan: Plan, layers: int, device: DeviceKind, *, pipeline: bool) -> list[Treatment]:
    """What is done to each layer of a stage, in the order of forward.

    Args:
        plan: The features that are on.
        layers: Of the stage.
        device: The kind of device; on a CPU nothing moves.
        pipeline: Whether other micro-batches come between a layer's forward and its backward.
    """
    replayed = _replayed(plan.features.get("recompute-layers"), layers)
    others = [number for number in range(layers) if number not in replayed]
    rebuilt: dict[str, set[int]] = {}
    for name in ("recompute-activation", "recompute-norm"):
        if name in plan.features:
            rebuilt[name] = _chosen(plan.features[name], others)
    swap = plan.features.get("swap-attention")
    moving = _moving(swap, layers, pipeline=pipeline) if swap and device != "cpu" else set()
    mlps = (swap.recompute_num_layers or 0) if swap else 0
    group = _group(plan.features.get("recompute-layers"))
    return [
        Treatment(replays=True, depth=number % group)
        if number in replayed
        else Treatment(
            rebuilds=frozenset(name for name, where in rebuilt.items() if number in where),
            moves=_modules(swap, mlp=number < mlps) if number in moving else frozenset(),
            replays_mlp=number < mlps,
            min_bytes=swap.min_bytes if swap else 1,
        )
        for number in range(layers)
    ]


def _replayed(config: Any, layers: int) -> set[int]:
    if config is None:
        return set()
    if config.layers is not None:
        return set(config.layers)
    if config.method == "uniform" or config.num_layers is None:
        return set(range(layers))
    return set(range(min(config.num_layers, layers)))


def _group(config: Any) -> int:
    """How many layers run again together."""
    return (config.num_layers or 1) if config is not None and config.method == "uniform" else 1


def _chosen(config: Any, others: list[int]) -> set[int]:
    """The layers whose values are rebuilt: named, or counted from the first not replayed."""
    if config.layers is not None:
        return set(config.layers) & set(others)
    return set(others[: config.num_layers])


def _moving(config: Any, layers: int, *, pipeline: bool) -> set[int]:
    """The layers that move: those whose backward comes at once after their forward stay."""
    stay = config.keep_last if config.keep_last is not None else 0 if pipeline else 1
    return set(range(max(0, layers - stay)))


def _modules(config: Any, *, mlp: bool) -> frozenset[str]:
    named = config.names
    words = [name for name in named or _SWAPPED if isinstance(name, str)]
    known = {word.rsplit(".", 1)[-1] for word in words} & set(_SWAPPED)
    return frozenset(known or _SWAPPED) | ({"mlp input"} if mlp else frozenset())
