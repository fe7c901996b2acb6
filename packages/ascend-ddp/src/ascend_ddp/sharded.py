"""The verb: each rank keeps the optimizer's state of its part of the parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import optim

from ascend_core.errors import ConfigError
from ascend_core.feature import chosen_config
from ascend_core.optim.rules import rule_for
from ascend_ddp._checkpoint import joined as join_state_dicts
from ascend_ddp._facade import ShardedOptimizer, check_reduced
from ascend_ddp._gather import refuse_shared_memory
from ascend_ddp._inner import check_inner, guarded, over_parts
from ascend_ddp._owned import Chunk, owned_of
from ascend_ddp.config import ShardedConfig
from ascend_ddp.reduce import GradientReduction

__all__ = ["ShardedOptimizer", "join_state_dicts", "shard_optimizer"]


def shard_optimizer(
    optimizer: optim.Optimizer,
    reduction: GradientReduction,
    config: ShardedConfig | None = None,
    *,
    wrap: Callable[[optim.Optimizer], optim.Optimizer] | None = None,
) -> ShardedOptimizer:
    """Divide an optimizer's state, and its work, among the data-parallel ranks.

    Each rank keeps state for its part of every bucket of gradients, steps that, and gathers the
    weights: what the optimizer keeps is divided by the number of ranks. Weights are equal, bit for
    bit, to those of the optimizer that steps whole parameters with the same gradients.

    Turns the plan of buckets into a fixed one, and the weights into views of flat buffers: a
    parameter keeps its shape, and its strides unless it has gaps.

    Args:
        optimizer: An elementwise optimizer of torch over the model's parameters. From now on its
            place is taken by what this returns. State that it has is divided.
        reduction: What `reduce_gradients` returned for the model, with `mode="reduce-scatter"`.
        config: The options; the defaults when left out.
        wrap: Is given the optimizer of this rank's parts, of one dimension each, and returns what
            steps them instead: one with FP32 masters, or with its state on the host. Not called on
            a rank that has no part.

    Returns:
        The optimizer to train with, which is the handle too: `wait()`, `report()`, `remove()`.

    Raises:
        ConfigError: When the optimizer cannot be sharded, the reduction is of another mode or
            sharded already, a parameter is not reduced, or two lie in the same memory.

    Example:
        >>> reduction = reduce_gradients(model, DDPConfig(mode="reduce-scatter"))
        >>> optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), reduction)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()
    """
    config = chosen_config("shard_optimizer", ShardedConfig, config)
    check_inner(optimizer)
    _check_reduction(reduction)
    kind = type(optimizer)
    facade: ShardedOptimizer = object.__new__(
        type(f"Sharded{kind.__name__}", (ShardedOptimizer, kind), {})
    )
    hooks = {name: kept for name, kept in vars(optimizer).items() if name.endswith("_hooks")}
    shared = {"defaults": optimizer.defaults, "param_groups": optimizer.param_groups}
    optim.Optimizer.__setstate__(facade, {**shared, **hooks})
    facade.config, facade._given, facade._reduction = config, optimizer, reduction
    facade._rule, facade._failure, facade._guards = rule_for(optimizer), None, []
    facade._chunks = []
    for reducer in reduction.reducers:
        refuse_shared_memory(reducer.parameters)
    check_reduced(optimizer.param_groups, reduction.reducers)
    before = optimizer.state_dict() if optimizer.state else None
    reduction.wait()
    facade._chunks = [Chunk(reducer, config.timeout_s) for reducer in reduction.reducers]
    facade._listed = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    parts = {key: owned.part for key, owned in owned_of(facade._chunks).items()}
    facade._inner = over_parts(optimizer, parts)
    try:
        if before is not None:
            facade._kept.load_whole(before, facade.defaults)
        if wrap is not None and parts:
            facade._inner = _checked_wrapped(wrap(facade._inner), facade._inner)
    except BaseException:
        for chunk in facade._chunks:
            chunk.weights.remove()
        raise
    optimizer.state.clear()
    for chunk in facade._chunks:
        chunk.reducer.buckets.is_fixed = True
        chunk.reducer.sums.are_shown = config.grad_scaler
    facade._guards = guarded(optimizer)
    reduction.admit(facade, optimizer)  # which says by itself that it was sharded
    return facade


def _check_reduction(reduction: object) -> None:
    if not isinstance(reduction, GradientReduction):
        raise ConfigError(
            f"shard_optimizer was given a {type(reduction).__name__} as its reduction.",
            instead="pass what reduce_gradients(model, DDPConfig(mode='reduce-scatter')) returned.",
        )
    if reduction.config.mode != "reduce-scatter":
        raise ConfigError(
            f"the gradients are reduced with mode={reduction.config.mode!r}.",
            why="every rank would get whole gradients, of which it needs its part alone.",
            instead="use reduce_gradients(model, DDPConfig(mode='reduce-scatter')).",
        )
    if not reduction.reducers:
        raise ConfigError(
            "the reduction was removed.", instead="call reduce_gradients again, and pass that."
        )
    if any(reducer.buckets.is_fixed for reducer in reduction.reducers):
        raise ConfigError(
            "an optimizer was sharded along this reduction already.",
            why="its buckets of weights are gathered by that one.",
            instead="put all parameters into groups of one optimizer, or remove() that one first.",
        )


def _checked_wrapped(wrapped: object, inner: optim.Optimizer) -> optim.Optimizer:
    parts = [[id(p) for p in group["params"]] for group in inner.param_groups]
    if not isinstance(wrapped, optim.Optimizer) or parts != [
        [id(p) for p in group["params"]] for group in wrapped.param_groups
    ]:
        raise ConfigError(
            f"wrap returned a {type(wrapped).__name__} that does not step the parts.",
            instead="return an optimizer over the parameters of the one that it is given.",
        )
    return wrapped
