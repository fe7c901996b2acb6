"""`CheckpointWithoutOutput`: recompute by hand, at a moment that the caller chooses.

The low-level form. `recompute_activation` does the same for a whole model without touching its
code; use this class where the function to run again is your own and you know its consumer.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_core.errors import ConfigError, ReplayError, StorageError
from ascend_core.layout import Layout, read
from ascend_core.modes import ContextFactory
from ascend_core.storage import Released, hollow, release, version_of, why_not_releasable
from ascend_recompute._replay import Replay, is_worthwhile
from ascend_recompute._structure import leaves_of

__all__ = ["CheckpointChain", "CheckpointWithoutOutput"]


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
    process. Without step 3, or when another consumer's backward comes first, backward raises
    autograd's error about a modification in place, with a version above 2**30. Without steps 2 and
    3 this is an ordinary checkpoint.

    The function must do the same when it runs again: its random numbers come from torch's default
    generators (no generator of its own), and what it changes outside (the running statistics of a
    `BatchNorm`) it changes twice. Inside torch's non-reentrant checkpoint, or a function that is
    itself checkpointed here, everything is run again as a whole: there the function is just called
    and nothing is freed. The same holds under `no_grad`, `torch.func` transforms and
    `torch.compile`.

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
        self._outputs: list[_Output] = []
        # Dead when the graph of the call is gone, or has no more use for it.
        self._replay: Callable[[], Replay | None] = _none
        self._restoration: Callable[[], _Restoration | None] = _none

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module that keeps this object begins with an object that holds no call.
        return type(self), (self._context_fn,)

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
        if not callable(function):
            raise ConfigError(
                f"checkpoint was given a {type(function).__name__} as its function.",
                instead="write checkpoint(function, False, *args).",
            )
        if isinstance(distribute_saved_activations, Tensor):
            raise ConfigError(
                "checkpoint was given a tensor as distribute_saved_activations.",
                why="the second argument is that flag, and the function's own follow it.",
                instead="write checkpoint(function, False, *args).",
            )
        if distribute_saved_activations:
            raise ConfigError(
                "distribute_saved_activations=True is not supported.",
                why="the inputs would be sharded over ranks, and a recomputation would need all "
                "ranks at the same moment.",
                instead="pass False; sequence parallelism shards activations without it.",
            )
        if self._replay() is not None or self._restoration() is not None:
            raise ConfigError(
                "this CheckpointWithoutOutput already holds a call whose backward has not run.",
                why="one object serves one call.",
                instead="make a new CheckpointWithoutOutput() in each forward.",
            )
        if not is_worthwhile():
            return function(*args, **kwargs)
        replay = Replay(function, args, kwargs, context_fn=self._context_fn)
        outputs = replay.forward(args, kwargs)
        self._outputs = _releasable(outputs, replay)
        # The graph holds the replay by its slots; where it saved nothing, this object does.
        self._replay = weakref.ref(replay) if replay.has_slots else lambda: replay
        return outputs

    def discard_output(self) -> None:
        """Free the storage of each output that can be freed.

        An output stays when it does not require grad, is an input, a captured tensor or a view of
        one, shares its storage with anything else, or is a view of something larger. One that was
        modified in place after the function returned it stays too, with a warning: running the
        function again would not bring the modification back. Nothing is freed under `no_grad`.
        """
        replay, self._replay = self._replay(), _none
        outputs, self._outputs = self._outputs, []
        if replay is None:
            return
        restoration = _Restoration(replay)
        for output in outputs:
            tensor = output.find()
            if tensor is None:
                continue
            if version_of(tensor) != output.version:
                warnings.warn(
                    "an output was modified in place after it was checkpointed; it is kept.",
                    stacklevel=2,
                )
                continue
            with contextlib.suppress(StorageError):  # the caller did something to its storage
                counter = None if tensor is output.probe else output.probe
                released = release(tensor, on_demand=restoration, counter=counter)
                restoration.add(output.place, released)
        self._restoration = weakref.ref(restoration)

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
        restoration = self._restoration()
        if restoration is not None:
            restoration()

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

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._context_fn,)

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


class _Restoration:
    """Puts the discarded outputs of one call back.

    Held by the storages that it is to restore (a note in `ascend_core.storage` says how), so it
    goes when the last of them is restored or dies.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._released: dict[int, weakref.ref[Released]] = {}

    def add(self, index: int, released: Released) -> None:
        """Note that output number `index` was released."""
        self._released[index] = weakref.ref(released)

    def __call__(self) -> None:
        """Run the function again and put its outputs where they were discarded.

        Each replayed output is dropped as soon as it is copied.
        """
        replay = self._replay
        with replay.lock:  # the hook of another consumer may be at it, in another thread
            waiting = [(i, there) for i, gone in self._released.items() if (there := gone())]
            if not waiting:
                return
            values = replay.again()
            for index, released in waiting:
                if index >= len(values) or not isinstance(values[index], Tensor):
                    raise ReplayError(
                        f"a checkpointed function returned no tensor as its value number {index} "
                        "when it ran again.",
                        why="in forward it did, and that output has to be restored.",
                        instead="return the same structure each time.",
                    )
                value, values[index] = values[index], None
                restored = released.restore(value)
                if restored is not None:
                    replay.share(value, restored)
                del value
            self._released.clear()


class _Output(NamedTuple):
    """An output that can be released, as the function returned it. Holds none of its bytes."""

    place: int
    tensor: weakref.ref[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    layout: Layout
    probe: Tensor
    version: int

    @classmethod
    def of(cls, place: int, tensor: Tensor) -> _Output:
        storage = weakref.ref(tensor.untyped_storage())
        probe, version = hollow(tensor), version_of(tensor)
        return cls(place, weakref.ref(tensor), storage, read(tensor), probe, version)

    def find(self) -> Tensor | None:
        """The output, or a stand-in where the caller let go of it and autograd holds an alias."""
        storage, tensor = self.storage(), self.tensor()
        if storage is None:
            return None
        if tensor is None:
            layout = self.layout
            whole = torch.empty(0, dtype=layout.dtype, device=storage.device)
            self.probe.data = whole.set_(storage, layout.offset, layout.size, layout.stride)
            return self.probe
        return tensor if tensor.untyped_storage() is storage else None


def _releasable(outputs: Any, replay: Replay) -> list[_Output]:
    leaves = enumerate(leaves_of(outputs))
    tensors = [(index, leaf) for index, leaf in leaves if isinstance(leaf, Tensor)]
    return [
        _Output.of(index, tensor)
        for index, tensor in tensors
        if tensor.requires_grad
        and _is_made_since(replay.since, tensor)
        and why_not_releasable(
            tensor, [*replay.inputs, *(other for place, other in tensors if place != index)]
        )
        is None
    ]


def _is_made_since(since: int, tensor: Tensor) -> bool:
    """Whether the tensor, or what it is a view of, came out of a node made since then."""
    base = tensor._base if tensor._is_view() else tensor
    node = None if base is None else base.grad_fn
    return node is not None and node._sequence_nr() >= since


def _none() -> None:
    return None
