"""Running an opaque function again, for what its autograd graph saved.

[Note: the graph is real, only what it saves is left out]
The function runs forward with grad, under a pair of hooks that puts an empty `Slot` wherever
autograd saves a tensor. So parameters, captured tensors, gradient hooks, `torch.autograd.grad`
and double backward meet an ordinary graph. When backward asks for the first slot (or an output
has to be restored) the function runs once more under hooks that collect what is saved, in the
same order, and the slots are filled. The graph of that second run is thrown away; no backward
runs inside a backward.

Who holds what: the graph's saved variables hold the slots, a slot holds its `Replay`, a replay
holds the arguments (detached, so no graph) and knows its slots weakly. When the graph goes,
everything goes; nothing here is a cycle.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ascend_core.errors import ReplayError
from ascend_core.layout import Layout
from ascend_core.modes import ForwardState
from ascend_core.saved import written_to
from ascend_core.storage import bring_back

__all__ = ["Replay"]


class Slot:
    """Stands for one tensor that the function's graph saved."""

    __slots__ = ("__weakref__", "index", "layout", "replay")

    def __init__(self, replay: Replay, index: int, layout: Layout) -> None:
        self.replay = replay
        self.index = index
        self.layout = layout


class Replay:
    """One call of a function: run forward now, and again when backward needs it.

    Attributes:
        lock: Held while the function runs again; two threads of the engine may ask at once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: ForwardState,
    ) -> None:
        self._function = function
        self._inputs, self._structure = pytree.tree_flatten((args, kwargs))
        self._inputs = [_without_graph(value) for value in self._inputs]
        self._versions = [
            value._version if isinstance(value, Tensor) else 0 for value in self._inputs
        ]
        self._state = state
        self._slots: list[weakref.ref[Slot]] = []
        self._values: dict[int, Tensor] = {}
        self.lock = threading.RLock()

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments, without their graph."""
        return [value for value in self._inputs if isinstance(value, Tensor)]

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the caller's own arguments."""
        with saved_tensors_hooks(self._leave_slot, _value_of):
            return self._function(*args, **kwargs)

    def again(self) -> list[Any]:
        """Run the function again and fill the slots.

        Returns:
            Its outputs, flattened, without a graph.

        Raises:
            RuntimeError: When an argument was modified in place since the forward.
            ReplayError: When the function saved other tensors than in forward.
        """
        with self.lock:
            self._bring_inputs_back()
            args, kwargs = pytree.tree_unflatten(self._inputs, self._structure)
            collected: list[Tensor] = []

            def collect(tensor: Tensor) -> None:
                collected.append(tensor.detach())

            with (
                self._state.replaying(),
                torch.enable_grad(),
                saved_tensors_hooks(collect, _never_asked),
            ):
                outputs = self._function(*args, **kwargs)
            self._fill(collected)
            return [
                value.detach() if isinstance(value, Tensor) else value
                for value in pytree.tree_leaves(outputs)
            ]

    def share(self, replayed: Tensor, restored: Tensor) -> None:
        """Let slots that look at the storage of `replayed` look at that of `restored` instead."""
        storage = replayed.untyped_storage()
        for index, value in self._values.items():
            if value.untyped_storage() is storage:
                self._values[index] = Layout.of(value).look_at(restored)

    def take(self, slot: Slot) -> Tensor:
        """The saved tensor of a slot. Runs the function again when the slot is empty."""
        with self.lock:
            if slot.index not in self._values:
                self.again()
            return self._values.pop(slot.index)

    def _leave_slot(self, tensor: Tensor) -> Slot:
        slot = Slot(self, len(self._slots), Layout.of(tensor))
        self._slots.append(weakref.ref(slot))
        return slot

    def _bring_inputs_back(self) -> None:
        for value, version in zip(self._inputs, self._versions, strict=True):
            if not isinstance(value, Tensor):
                continue
            if value._version != version:
                raise written_to(value, value.size(), version)
            bring_back(value)

    def _fill(self, collected: list[Tensor]) -> None:
        if len(collected) != len(self._slots):
            raise ReplayError(
                f"{_name(self._function)} saved {len(self._slots)} tensors in forward and "
                f"{len(collected)} when it ran again.",
                why="it depends on something that changed between forward and backward.",
                instead="make it depend on its arguments, random state and autocast mode alone, "
                "or pass a context_fn that restores the rest.",
            )
        self._values.clear()
        for index, (reference, value) in enumerate(zip(self._slots, collected, strict=True)):
            slot = reference()
            if slot is None:
                continue
            if (value.size(), value.dtype) != (slot.layout.size, slot.layout.dtype):
                raise ReplayError(
                    f"{_name(self._function)} saved a tensor of {list(slot.layout.size)} "
                    f"{slot.layout.dtype} in forward and of {list(value.size())} {value.dtype} "
                    "when it ran again.",
                    why="it depends on something that changed between forward and backward.",
                    instead="make it depend on its arguments, random state and autocast mode "
                    "alone, or pass a context_fn that restores the rest.",
                )
            self._values[index] = value


def _without_graph(value: Any) -> Any:
    """The argument as the function may see it again: same storage, no graph behind it."""
    if type(value) is not Tensor:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _value_of(slot: Slot) -> Tensor:
    return slot.replay.take(slot)


def _never_asked(_: None) -> Tensor:
    raise AssertionError("the graph of a replay runs no backward")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
