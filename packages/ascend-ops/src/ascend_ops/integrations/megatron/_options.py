"""Fused operators by the options that a training script of megatron-core has parsed."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ascend_core.errors import ConfigError
from ascend_ops.integrations.megatron._spec import with_fused_ops

__all__ = ["add_ops_arguments", "ops_by_options"]

_POSITIONS = "--position-embedding-type"
# Options of MindSpeed's that are on and off, and the operators that they turn on.
_SWITCHES = {"use_fused_swiglu": "swiglu", "use_fused_rmsnorm": "rms_norm"}


def add_ops_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--use-fused-swiglu` and `--use-fused-rmsnorm` to a training script's parser.

    And `alibi` to the choices of `--position-embedding-type`, an option that is added where the
    parser has none. Fits as (a part of) the `extra_args_provider` of Megatron-LM's scripts.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("fused operators")
    group.add_argument(
        "--use-fused-swiglu",
        "--used-fused-swiglu",
        action="store_true",
        help="compute the gated activation of MLPs by one operator",
    )
    group.add_argument(
        "--use-fused-rmsnorm", action="store_true", help="compute RMSNorm by one operator"
    )
    for action in parser._actions:  # argparse has no other way to ask for an option
        if _POSITIONS in action.option_strings:
            if action.choices is not None:
                action.choices = [*action.choices, "alibi"]
            return parser
    group.add_argument(
        _POSITIONS,
        default="learned_absolute",
        choices=["learned_absolute", "rope", "mrope", "relative", "none", "alibi"],
        help="what tells positions apart; alibi is a bias of attention",
    )
    return parser


def ops_by_options(
    spec: ModuleSpec | TransformerBlockSubmodules,
    config: Any,
    options: Any,
    *,
    vp_stage: int | None = None,
) -> ModuleSpec | TransformerBlockSubmodules:
    """Change a spec as the options of megatron-core and MindSpeed ask for.

    The options that count: `use_fused_swiglu`, `use_fused_rmsnorm`, and `position_embedding_type`
    where it is `"alibi"`. See `with_fused_ops` for what they do.

    Args:
        spec: Of a transformer layer, or of a block of layers. Stays as it is.
        config: The `TransformerConfig` that the model will be built from.
        options: Has the options as attributes, as `get_args()` does; those that it lacks are off.
        vp_stage: The stage in virtual pipelining, as the model is given it.

    Returns:
        The spec to build the model from: the given one where no option asks for an operator.

    Raises:
        ConfigError: As `with_fused_ops`, and when rotary embedding is asked for beside ALiBi.
    """
    operators = [name for option, name in _SWITCHES.items() if getattr(options, option, False)]
    if getattr(options, "position_embedding_type", None) == "alibi":
        if getattr(options, "use_rotary_position_embeddings", False):
            raise ConfigError(
                "use_rotary_position_embeddings and position_embedding_type='alibi' cannot be used "
                "together.",
                why="both say how positions are told apart.",
                instead="leave one of them out.",
            )
        operators.append("alibi_attention")
    if not operators:
        return spec
    return with_fused_ops(spec, config, operators, vp_stage=vp_stage)
