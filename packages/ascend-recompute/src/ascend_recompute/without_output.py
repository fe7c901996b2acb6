"""`CheckpointWithoutOutput`: recompute by hand, at a moment that the caller chooses.

The low-level form. `recompute_activation` does the same for a whole model without touching its
code; use this class where the function to run again is your own and you know its consumer.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ascend_core.errors import ConfigError, ReplayError
from ascend_core.modes import ForwardState
from ascend_core.storage import Released, release, why_not_releasable
from ascend_recompute._replay import Replay

__all__ = ["CheckpointChain", "CheckpointWithoutOutput"]

ContextFactory = Callable[[], AbstractContextManager[Any]]


class CheckpointWithoutOutput:
    """Runs a function so that neither its inner tensors nor its output wait for backward.

    Three calls, in this order:

    1. `checkpoint(function, False, *args)` runs the function; nothing that it saves is kept.
    2. `discard_output()`, once the consumer of the output has run: frees the output's storage.
    3. `consumer_output.register_hook(obj.recompute)`: before the consumer's backward the function
       runs again and the output's storage is restored; the function's own backward uses what
       that run saved and does not run it a third time.

    One object serves one call of a function. Between 2 and 3 the output must not be read: doing so
    raises, but a view of it that was made before cannot be guarded, and reading one on CPU ends the
    process. Without step 3 the consumer's backward reads freed memory: never leave it out when
    the consumer's output requires grad.

    Args:
        context_fn: Makes a context to enter when the function runs again, for modes that are not
            known here (a quantisation recipe, say). None, False and 0 mean none.

    Example:
        >>> ckpt = CheckpointWithoutOutput()
        >>> c = ckpt.checkpoint(activation, False, b)
        >>> d = down_projection(c)
        >>> ckpt.discard_output()
        >>> if d.requires_grad:
        ...     d.register_hook(ckpt.recompute)
    """

    def __init__(self, context_fn: ContextFactory | None = None) -> None:
        self._context_fn = context_fn
        self._replay: Replay | None = None
        self._outputs: list[_Output] = []
        self._released: dict[int, Released] = {}

    def checkpoint(
        self,
        function: Callable[..., Any],
        distribute_saved_activations: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run `function(*args, **kwargs)`, to be run again in backward.

        Args:
            function: Any callable: modules, bound methods and closures may hold parameters.
            distribute_saved_activations: Must be False; megatron's option to shard what is saved
                over tensor-parallel ranks is refused.
            *args: Passed on, tensors or not; tensors may stand in nested containers.
            **kwargs: Passed on likewise.

        Returns:
            What the function returns.

        Raises:
            ConfigError: When `distribute_saved_activations` is true, or the object is in use.
        """
        if distribute_saved_activations:
            raise ConfigError(
                "distribute_saved_activations=True is not supported.",
                why="the inputs would be sharded over ranks, and a recomputation would need all "
                "ranks at the same moment.",
                instead="pass False; sequence parallelism shards activations without it.",
            )
        if self._replay is not None:
            raise ConfigError(
                "this CheckpointWithoutOutput already holds a call whose backward has not run.",
                why="one object serves one call.",
                instead="make a new CheckpointWithoutOutput() in each forward.",
            )
        if not (torch.is_grad_enabled() and _hooks_are_allowed()):
            return function(*args, **kwargs)
        devices = {leaf.device for leaf in _tensors((args, kwargs)) if not leaf.is_cpu}
        state = ForwardState.capture(devices=devices, context_fn=self._context_fn)
        replay = Replay(function, args, kwargs, state)
        outputs = replay.forward(args, kwargs)
        noted = [
            _Output(index, weakref.ref(leaf), leaf.detach(), leaf._version)
            for index, leaf in enumerate(pytree.tree_leaves(outputs))
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if noted:
            self._replay, self._outputs = replay, noted
        return outputs

    def discard_output(self) -> None:
        """Free the storage of each output that can be freed.

        An output stays when it does not require grad, is an input or a view of one, shares its
        storage with anything else, or is a view of something larger. One that was modified in
        place after the function returned it stays too, with a warning: running the function again
        would not bring the modification back. Nothing is freed under `no_grad`.
        """
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            assert self._replay is not None
            tensor = output.tensor()
            if tensor is None:  # the caller let go of it; autograd may not have
                tensor = output.alias
            others = [other.alias for other in outputs if other is not output]
            if why_not_releasable(tensor, [*self._replay.inputs, *others]) is not None:
                continue
            if tensor._version != output.version:
                warnings.warn(
                    "an output was modified in place after it was checkpointed; it is kept.",
                    stacklevel=2,
                )
                continue
            self._released[output.index] = release(tensor, on_demand=self.recompute)

    def recompute(self, grad: Tensor | None = None) -> None:
        """Run the function again and restore what was discarded; a hook for the consumer's output.

        Calling it again does nothing. Allocates the outputs a second time while they are copied
        back, one after the other.

        Args:
            grad: The gradient that a hook is given; not used.

        Raises:
            RuntimeError: When an argument was modified in place since the forward.
            ReplayError: When the function does not do again what it did in forward.
        """
        replay = self._replay
        if replay is None:
            return
        with replay.lock:
            if self._replay is None:  # the hook of another consumer was first
                return
            try:
                _restore(self._released, replay)
            finally:
                self._replay, self._released, self._outputs = None, {}, []

    def discard_output_and_register_recompute(self, consumer_output: Tensor) -> None:
        """Steps 2 and 3 in one: discard now, restore before the backward of `consumer_output`."""
        self.discard_output()
        if consumer_output.requires_grad:
            consumer_output.register_hook(self.recompute)  # type: ignore[no-untyped-call]


class CheckpointChain:
    """Several checkpoints that feed one another, discarded together and restored in order.

    Example:
        >>> chain = CheckpointChain()
        >>> a = chain.checkpoint(norm, x)
        >>> b = chain.checkpoint(activation, up(a))
        >>> y = down(b)
        >>> chain.discard_outputs_and_register_recompute(y)
    """

    def __init__(self, context_fn: ContextFactory | None = None) -> None:
        self._context_fn = context_fn
        self._links: list[CheckpointWithoutOutput] = []

    def __len__(self) -> int:
        return len(self._links)

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as the next link; as `CheckpointWithoutOutput.checkpoint`."""
        link = CheckpointWithoutOutput(self._context_fn)
        output = link.checkpoint(function, False, *args, **kwargs)
        self._links.append(link)
        return output

    def discard_outputs_and_register_recompute(self, consumer_output: Tensor) -> None:
        """Discard every output now; restore them in forward order before backward needs them."""
        for link in self._links:
            link.discard_output()
        if consumer_output.requires_grad:
            consumer_output.register_hook(self.recompute)  # type: ignore[no-untyped-call]
        else:
            self._links.clear()

    def recompute(self, grad: Tensor | None = None) -> None:
        """Restore every output in forward order, and let go of each link as it is done."""
        links, self._links = self._links[::-1], []
        while links:
            links.pop().recompute()


@dataclasses.dataclass(frozen=True)
class _Output:
    """An output that requires grad, as the function returned it."""

    index: int
    tensor: weakref.ref[Tensor]
    alias: Tensor
    version: int


def _restore(released: dict[int, Released], replay: Replay) -> None:
    """Run the function again and put its outputs where they were discarded.

    Each replayed output is dropped as soon as it is copied.
    """
    if not released:
        return
    values = replay.again()
    if max(released) >= len(values):
        raise ReplayError(
            f"a checkpointed function returned {len(values)} values when it ran again.",
            why=f"output number {max(released)} of its forward has to be restored.",
            instead="return the same structure each time.",
        )
    for index, storage in released.items():
        value, values[index] = values[index], None
        storage.restore(value)
        replay.share(value, storage.alias)
        del value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _hooks_are_allowed() -> bool:
    """Whether this is not inside a `torch.func` transform, which forbids hooks on saved tensors."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled
