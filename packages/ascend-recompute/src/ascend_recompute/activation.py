"""Activation recompute: an MLP's activations are rebuilt just before backward needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from ascend_core.modules import find_mlps
from ascend_recompute._options import merged
from ascend_recompute._recorder import RebuildKeeper
from ascend_recompute._recording import Recording
from ascend_recompute._selection import rebuild
from ascend_recompute._tally import Tally
from ascend_recompute._values import ValueRecompute
from ascend_recompute.config import RecomputeActivationConfig
from ascend_recompute.policy import DEFAULT, Policy

__all__ = ["rebuild_region", "recompute_activation"]


def recompute_activation(
    model: nn.Module,
    config: RecomputeActivationConfig | None = None,
    *,
    modules: Sequence[str | type[nn.Module]] | None = None,
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    policy: Policy | None = None,
    verify: bool = False,
) -> ValueRecompute:
    """Rebuild the activations of the model's MLPs in backward instead of keeping them.

    Inside the chosen modules every activation function, elementwise product or sum, cast and
    dropout is recorded; where autograd saves the result of one, it gets a recipe in its place,
    and the value is computed again when backward asks for it. The model's code, classes and
    state dict stay as they are. Loss, gradients and weights are equal to the plain run, bit for
    bit. A recipe is used only where its inputs are held by autograd anyway, so no model ever
    holds more than without.

    Args:
        model: Any module; the MLPs are looked for inside it.
        config: The options; or give them by keyword.
        modules: As in `RecomputeActivationConfig`.
        layers: As in `RecomputeActivationConfig`.
        num_layers: As in `RecomputeActivationConfig`.
        policy: As in `RecomputeActivationConfig`.
        verify: As in `RecomputeActivationConfig`.

    Returns:
        A handle: `report()` says how many bytes each module no longer holds, `remove()` undoes.

    Raises:
        ConfigError: When options are given twice, or name modules that the model does not have.

    Example:
        >>> handle = recompute_activation(model)
        >>> model(batch).backward()
        >>> handle.report()["saved_bytes"]
    """
    config = merged(
        recompute_activation,
        RecomputeActivationConfig,
        config,
        modules=modules,
        layers=layers,
        num_layers=num_layers,
        policy=policy,
        verify=verify,
    )
    return rebuild(recompute_activation, model, config, find_mlps, DEFAULT)


@contextlib.contextmanager
def rebuild_region(policy: Policy | None = None, *, label: str = "region") -> Iterator[Tally]:
    """Rebuild in backward what cheap operators make inside the block; for code without modules.

    Args:
        policy: Which operators may be run again; `ascend_recompute.policy.DEFAULT` by default.
        label: The name in the report.

    Yields:
        An object whose `by_label()` tells the bytes that are no longer held.

    Example:
        >>> with rebuild_region():
        ...     y = down(torch.nn.functional.silu(gate(x)) * up(x))
    """
    keeper = RebuildKeeper(policy or DEFAULT)
    with Recording(keeper, label):
        yield keeper.tally
