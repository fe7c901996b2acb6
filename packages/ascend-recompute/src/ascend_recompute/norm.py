"""Norm recompute: the outputs of LayerNorm and RMSNorm are rebuilt when backward needs them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ascend_core.modules import find_norms
from ascend_recompute._options import merged
from ascend_recompute._selection import rebuild
from ascend_recompute._values import ValueRecompute
from ascend_recompute.config import RecomputeNormConfig
from ascend_recompute.policy import ARITHMETIC, CASTS, NORMS, Policy

__all__ = ["recompute_norm"]

DEFAULT = Policy(operators=NORMS | ARITHMETIC | CASTS)
"""Norms, and the arithmetic and casts that norms written in Python are made of."""


def recompute_norm(
    model: nn.Module,
    config: RecomputeNormConfig | None = None,
    *,
    modules: Sequence[str | type[nn.Module]] | None = None,
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    policy: Policy | None = None,
    verify: bool = False,
) -> ValueRecompute:
    """Rebuild the outputs of the model's norms in backward instead of keeping them.

    What a norm returns is saved by every linear layer that reads it. It is dropped, and computed
    again from the norm's input, which the norm's own backward needs anyway. The statistics are
    computed again with it; the norm's backward uses those of the forward. Loss, gradients and
    weights are equal to the plain run, bit for bit.

    Args:
        model: Any module; the norms are looked for inside it.
        config: The options; or give them by keyword.
        modules: As in `RecomputeNormConfig`.
        layers: As in `RecomputeNormConfig`.
        num_layers: As in `RecomputeNormConfig`.
        policy: As in `RecomputeNormConfig`.
        verify: As in `RecomputeNormConfig`.

    Returns:
        A handle: `report()` says how many bytes each norm no longer holds, `remove()` undoes.

    Raises:
        ConfigError: When options are given twice, or name modules or layers that the model does
            not have.

    Example:
        >>> handle = recompute_norm(model)
        >>> model(batch).backward()
        >>> handle.report()["saved_bytes"]
    """
    config = merged(
        recompute_norm,
        RecomputeNormConfig,
        config,
        modules=modules,
        layers=layers,
        num_layers=num_layers,
        policy=policy,
        verify=verify,
    )
    return rebuild(recompute_norm, model, config, find_norms, DEFAULT)
