"""A true `torch.optim.Optimizer` of which each rank keeps and steps a part.

[Note: a step]
A backward leaves on each rank the sums of its part of every bucket. `step()` steps the parts, which
are views of flat buffers of weights, and gathers these buckets in the order of forward. It returns
while they travel; whatever reads a weight waits for its bucket (see `_travelling`).

Whether a parameter is stepped is agreed: it is, where a rank had a gradient for it. So all ranks
gather the same buckets. A step that fails on one rank gathers nothing there: the others cannot go
on with weights of which a part is missing, and are told so when they read one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import ConfigError, FeatureError, OptimizerFailedError
from ascend_core.optim.rules import Rule
from ascend_core.optim.schedulers import tell_schedulers
from ascend_ddp._inner import options_of
from ascend_ddp._kept import KeptState
from ascend_ddp._norm import total_norm
from ascend_ddp._owned import Chunk, owned_of
from ascend_ddp._reducer import Reducer
from ascend_ddp.config import ShardedConfig
from ascend_ddp.reduce import GradientReduction

__all__ = ["ShardedOptimizer", "check_reduced"]


class ShardedOptimizer(optim.Optimizer):
    """Made by `shard_optimizer`. An instance is also one of the class that was sharded.

    `param_groups`, `defaults` and the hooks are those of the given optimizer, shared with it; what
    schedulers write there is taken over at each step. Gradients are used up by `step()`.
    """

    config: ShardedConfig
    _given: optim.Optimizer
    _inner: optim.Optimizer
    _reduction: GradientReduction
    _chunks: list[Chunk]
    _rule: Rule
    _guards: list[RemovableHandle]
    _listed: list[list[int]]  # ids of the parameters of each group
    _failure: str | None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step this rank's part of each parameter that a rank had a gradient for. A collective.

        Args:
            closure: Computes the loss, and the gradients, anew.

        Returns:
            What the closure returned.

        Raises:
            OptimizerFailedError: When this step, or one before it, failed half-way.
            ConfigError: When parameters were exchanged or moved. Nothing was stepped.
            FeatureError: When this optimizer, or the reduction, was removed.
        """
        self._check_trains()
        tell_schedulers(self._given)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_over()
        try:
            self._inner.step()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            for chunk in self._chunks:
                chunk.drop_gradients()
                # Without this optimizer: a hook of a parameter keeps the reducer, and it that.
                chunk.reducer.refusal = partial(_failed, chunk.rank, self._failure)
            if isinstance(error, Exception):
                raise _failed(self._chunks[0].rank, self._failure) from error
            raise
        listed = {key for group in self._listed for key in group}
        for chunk in self._chunks:
            if chunk.reducer.sums.are_held:
                chunk.drop_gradients()
                chunk.send_weights(listed)
        if not self.config.overlap_param_gather:
            self.wait()
        return loss

    def _take_over(self) -> None:
        """Give the inner optimizer the options and gradients as they are now."""
        self._reduction.wait()
        for chunk in self._chunks:
            chunk.weights.check()
        if [[id(p) for p in group["params"]] for group in self.param_groups] != self._listed:
            raise ConfigError(
                "the parameters of a group were exchanged after the optimizer was sharded.",
                why="ranks have divided the others among themselves.",
                instead="use add_param_group() for new ones; for others, shard the optimizer "
                "again.",
            )
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(options_of(group))
        for chunk in self._chunks:
            chunk.give_gradients()

    def wait(self) -> None:
        """Wait until the weights are whole. Reading a weight does so for its bucket.

        On an accelerator the current stream waits, and the host goes on.

        Raises:
            CommunicationError: When a rank has ended, or does not come in time.
        """
        for chunk in self._chunks:
            chunk.weights.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those that were accumulated and not yet sent.

        Args:
            set_to_none: Taken for True, whatever it is: sums that lie on other ranks cannot be
                shown as zeros.
        """
        super().zero_grad(set_to_none=True)
        for chunk in self._chunks:
            chunk.drop_gradients()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients of all ranks together. A collective.

        Each element counts once. The norm is that of `torch.nn.utils.clip_grad_norm_` but for the
        order in which it is added up.

        Args:
            max_norm: The most that the norm may be.
            norm_type: Which norm, above 0; `math.inf` for the largest element.

        Returns:
            The total norm before clipping; 0-d, FP32 (FP64 where a parameter is), the same on every
            rank.

        Raises:
            ConfigError: When there is no such norm.
            OptimizerFailedError: When a step failed half-way.
        """
        _check_norm(max_norm, norm_type)
        self._check_trains()
        self._reduction.send_before(self)
        self._take_over()
        own = [owned.part.grad for owned in owned_of(self._chunks).values()]
        grads = [grad for grad in own if grad is not None]
        reducer = self._chunks[0].reducer
        kinds = {parameter.dtype for chunk in self._chunks for parameter in chunk.parameters}
        dtype = torch.float64 if kinds & {torch.float64, torch.complex128} else torch.float32
        group, device = reducer.group, reducer.buckets.device
        total = total_norm(grads, float(norm_type), dtype, device, group)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device))
        return total

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that are reduced and in no group yet.

        Raises:
            ConfigError: When one is not reduced by the handle that this optimizer works with.
        """
        self._check_trains()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_reduced([group], [chunk.reducer for chunk in self._chunks])
        except ConfigError:
            self.param_groups.pop()
            raise
        owned = owned_of(self._chunks)
        own = [owned[id(p)].part for p in group["params"] if id(p) in owned]
        self._inner.add_param_group({**options_of(group), "params": own})
        self._listed.append([id(p) for p in group["params"]])

    # Checkpoints

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """What this rank keeps, by the model's parameter: of its own part, [elements], live."""
        return self._kept.by_parameter()

    @property
    def _kept(self) -> KeptState:
        return KeptState(self.param_groups, self._inner, self._chunks, self._rule)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in the form of the optimizer that was sharded. A collective.

        Every rank has to call it, and every rank gets it, on the host. It is what the optimizer
        would have that steps whole parameters, with FP32 masters beside where they are kept.

        Raises:
            OptimizerFailedError: When a step failed half-way.
        """
        self._check_usable()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.wait()
        result = self._kept.whole()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def local_state_dict(self) -> dict[str, Any]:
        """What this rank keeps, to be saved by each rank for itself. No collective.

        `load_local_state_dict` takes it on as many ranks; `join_state_dicts` makes one checkpoint
        of those of all ranks, which any number of ranks can load.

        Returns:
            `rank` and `ranks`; `ranges`: which elements of each parameter this rank owns, by the
            number of the parameter; `param_groups`; and `state`: for each parameter that has some,
            the `range` of its elements, its `size` and `stride`, and the `state` of those, live.

        Raises:
            OptimizerFailedError: When a step failed half-way.
        """
        self._check_usable()
        return self._kept.local()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state: of this optimizer, on any number of ranks, or of a plain one.

        Each rank keeps its part. Ends the state of having failed.

        Args:
            state_dict: What `state_dict()` returned, on every rank. It is not kept.

        Raises:
            ConfigError: When it does not fit these parameters. Nothing was loaded then.
        """
        self._check_not_removed()
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = before(self, loaded) or loaded
        self._kept.load_whole(loaded, self.defaults)
        self._be_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `local_state_dict()` returned on this rank, with as many ranks as then.

        Raises:
            ConfigError: When it is that of another rank, or of other parts. Nothing was loaded.
        """
        self._check_not_removed()
        self._kept.load_local(state_dict, self.defaults)
        self._be_loaded()

    def _be_loaded(self) -> None:
        """Be done with what was before."""
        for chunk in self._chunks:
            chunk.drop_gradients()
            chunk.reducer.refusal = None
        self._failure = None

    # The handle

    def report(self) -> Mapping[str, Any]:
        """What this rank keeps, and what travelled; byte counts are in bytes.

        Returns:
            `optimizer`; `ranks`; `parameters`; `elements` of all of them; `own_elements`: of this
            rank's parts; `own_state_bytes`: of the state of those; `weight_bytes`: of the flat
            buffers; `gathers`: how many buckets were gathered; `late_waits`: how often a read that
            was no module's forward had to wait; `inner`: what an optimizer that wraps the parts
            reports.
        """
        buckets = [bucket for chunk in self._chunks for bucket in chunk.weights.buckets]
        owned = owned_of(self._chunks).values()
        wrapped = getattr(self._inner, "report", None)
        tensors = [value for state in self.state.values() for value in state.values()]
        return {
            "optimizer": type(self._given).__name__,
            "ranks": self._chunks[0].ranks if self._chunks else 0,
            "parameters": sum(len(bucket.plan.slots) for bucket in buckets),
            "elements": sum(slot.numel for bucket in buckets for slot in bucket.plan.slots),
            "own_elements": sum(o.piece.numel for o in owned),
            "own_state_bytes": sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.dim()),
            "weight_bytes": sum(bucket.flat.nbytes for bucket in buckets),
            "gathers": sum(bucket.gathers for bucket in buckets),
            "late_waits": sum(bucket.waits for bucket in buckets),
            "inner": dict(wrapped()) if callable(wrapped) else {},
        }

    def remove(self) -> None:
        """Give the whole state back to the given optimizer, and each weight its own memory.

        A collective, as `state_dict()`. FP32 masters are given back with the rest. A second call
        does nothing. The reduction may have been removed before.

        Raises:
            OptimizerFailedError: When a step failed half-way and no checkpoint was loaded since.
        """
        if not self._chunks:
            return
        whole = self.state_dict()
        for chunk in self._chunks:
            chunk.drop_gradients()
            chunk.weights.remove()
            chunk.reducer.buckets.is_fixed = chunk.reducer.sums.are_shown = False
        self._reduction.admit(self)  # which says by itself that it was removed
        for guard in self._guards:
            guard.remove()
        self._chunks = []
        self._given.load_state_dict(whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        raise _refused_copy("copied", "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused_copy("pickled", "pickle")

    def _check_not_removed(self) -> None:
        if not self._chunks:
            raise FeatureError(
                "this sharded optimizer was removed.",
                instead="use the optimizer that it was made from.",
            )

    def _check_usable(self) -> None:
        self._check_not_removed()
        if self._failure is not None:
            raise _failed(self._chunks[0].rank, self._failure)

    def _check_trains(self) -> None:
        self._check_usable()
        if not self._reduction.reducers:
            raise FeatureError(
                "the reduction that this sharded optimizer works with was removed.",
                why="its gradients are no longer summed over the ranks.",
                instead="remove() the optimizer, too, which gives the whole state back; or "
                "reduce and shard again.",
            )


def _failed(rank: int, failure: str) -> OptimizerFailedError:
    return OptimizerFailedError(
        "a step of the sharded optimizer failed half-way.",
        why=f"on rank {rank}: {failure}. Its weights were not gathered, and the ranks differ.",
        instead="load a checkpoint of the model and of the optimizer on all ranks, or begin again.",
    )


def _refused_copy(what: str, how: str) -> FeatureError:
    return FeatureError(
        f"a sharded optimizer cannot be {what}.",
        why=f"its state is spread over the ranks, and {how} works on one.",
        instead="save its state_dict() or local_state_dict(), and load that into another one.",
    )


def _check_norm(max_norm: object, norm_type: object) -> None:
    """Refuse what is no norm before it is added up over ranks."""
    if not isinstance(max_norm, (int, float, Tensor)):
        raise ConfigError(
            f"max_norm is {max_norm!r}.", instead="use a number, such as 1.0, or a 0-d tensor."
        )
    try:
        order = float(norm_type)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise ConfigError(
            f"norm_type is {norm_type!r}.",
            why="a norm over the parts of all ranks is added up from powers of that.",
            instead="use a number above 0, or math.inf for the largest element.",
        )


def check_reduced(groups: Sequence[Mapping[str, Any]], reducers: Sequence[Reducer]) -> None:
    """Refuse groups with a parameter that no bucket has.

    Raises:
        ConfigError: Naming it.
    """
    known = {
        id(reducer.parameters[index])
        for reducer in reducers
        for bucket in reducer.buckets
        for index in bucket.indices
    }
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"parameter {position} of group {number} is not reduced.",
                    why="the handle reduces the gradients of another model, or was made while the "
                    "parameter was frozen.",
                    instead="pass the handle that reduce_gradients returned for this model.",
                )
