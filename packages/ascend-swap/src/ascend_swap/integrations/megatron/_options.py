"""Turning swap-attention on by the options that a training script of megatron-core has parsed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.pinned import PinnedPool
from ascend_core.stack import find_stack
from ascend_swap.attention import AttentionSwap, swap_attention
from ascend_swap.config import SwapAttentionConfig

__all__ = ["add_swap_arguments", "swap_by_options"]

# What MindSpeed's option is when nobody gave it: as far as the model has them.
_DEFAULT_MODULES = "input_norm,self_attention,post_attention_norm"
_OWN_OFFLOADS = ("cpu_offloading", "fine_grained_activation_offloading")


def add_swap_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--swap-attention` and `--swap-modules` to a training script's parser.

    And `--recompute-num-layers`, where the parser has no such option. Fits as (a part of) the
    `extra_args_provider` of Megatron-LM's scripts.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("swap-attention")
    group.add_argument(
        "--swap-attention",
        action="store_true",
        help="keep what attention saves for backward on the host, and fetch it ahead of need",
    )
    group.add_argument(
        "--swap-modules",
        default=None,
        help="names of the modules whose activations move, with commas between them",
    )
    with contextlib.suppress(argparse.ArgumentError):  # megatron-core's own
        group.add_argument(
            "--recompute-num-layers",
            type=int,
            default=None,
            help="recompute the MLPs of so many layers of each pipeline stage",
        )
    return parser


def swap_by_options(
    chunks: nn.Module | Sequence[nn.Module],
    options: Any,
    *,
    config: SwapAttentionConfig | None = None,
    pool: PinnedPool | None = None,
) -> AttentionSwap | None:
    """Turn swap-attention on as the options of megatron-core and MindSpeed ask for.

    The options that count:

    * `swap_attention`: turns it on.
    * `swap_modules`: which modules; self_attention where it is left out.
    * `recompute_num_layers`: in how many layers of this pipeline stage the MLP is recomputed.
      With `recompute_granularity="full"` the number is megatron-core's own, and no MLP is.

    Args:
        chunks: The model, or all model chunks of this pipeline stage, also wrapped ones. What the
            report calls a layer is then its number among the layers of the stage, from 0.
        options: Has the options as attributes, as `get_args()` does; those that it lacks are off.
        config: All other options of `swap_attention`.
        pool: Host memory that is shared with other features, instead of a pool of its own.

    Returns:
        The handle of `swap_attention`; None where the options do not ask for it.

    Raises:
        ConfigError: When megatron-core moves activations itself, or as `swap_attention`.
    """
    if not getattr(options, "swap_attention", False):
        return None
    models = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    parts = (part for model in models for part in model.modules())
    own = next((part.config for part in parts if hasattr(part, "config")), None)
    _check_own_offload(options, own)
    changes: dict[str, Any] = {}
    modules = getattr(options, "swap_modules", None)
    if modules is not None and modules != _DEFAULT_MODULES:
        changes["swap_modules"] = modules
    number = getattr(options, "recompute_num_layers", None)
    full = "full" in (getattr(one, "recompute_granularity", None) for one in (options, own))
    if number is not None and not full:
        changes["recompute_num_layers"] = number
    config = dataclasses.replace(config or SwapAttentionConfig(), **changes)
    return swap_attention(_stage(models), config, pool=pool)


def _stage(models: Sequence[nn.Module]) -> nn.Module:
    """One module in which all layers of the stage are a stack."""
    if len(models) == 1:
        return models[0]
    stacks = [stack for model in models if (stack := find_stack(model)) is not None]
    return nn.ModuleList(layer for stack in stacks for layer in stack.layers.values())


def _check_own_offload(*options: Any) -> None:
    for name in _OWN_OFFLOADS:
        if any(getattr(one, name, False) for one in options):
            raise ConfigError(
                f"swap_attention and {name} cannot be used together.",
                why="megatron-core moves the same activations to the host itself.",
                instead=f"turn {name} off, or swap_attention.",
            )
