"""Running an opaque function again, for what its autograd graph saved.

[Note: the graph is real, only what it saves is left out]
The function runs forward with grad, under a pair of hooks that puts an empty `Slot` wherever
autograd saves a tensor (a parameter stays as it is). So parameters, captured tensors, gradient
hooks, `torch.autograd.grad` and double backward meet an ordinary graph. When backward asks for
the first slot (or an output has to be restored) the function runs once more under hooks that
collect what is saved, in the same order, and the slots are filled. The graph of that second run is
thrown away; no backward runs inside a backward (unless the function takes a gradient itself).

[Note: the second run may stop early]
Where nobody needs the outputs, what comes after the last tensor that is still asked for (the last
linear layer of a block) need not run again: with `early_stop`, `_Enough` ends the function there.
It is not the default, since a function that sets something and puts it back at its end, and not
in a `finally`, would leave it set. With `verify` the run to the end follows it, and shows that.

[Note: one after the other]
A call whose argument is the output of an earlier replay need not hold it: running that one again
gives it (`before`). So a group of layers holds the first one's input only, and runs again as one.

Who holds what: the graph's saved variables hold the slots, a slot holds its value and its `Replay`,
a replay holds the arguments (detached, so no graph), or the replay that makes them, and knows
its slots weakly. When the graph
goes, everything goes; nothing here is a cycle.

[Note: what must not change between the two runs]
Running again gives the same only where nothing that the function reads was written to meanwhile.
Known to a replay are its arguments, the leaves that its graph ends in (parameters), and the
captured tensors that its graph saved: a write to one of them raises autograd's own error, where
plain autograd would also raise or would have a saved copy of the old result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from ascend_core.errors import ReplayError
from ascend_core.layout import Layout, read
from ascend_core.modes import ContextFactory, ForwardState
from ascend_core.saved import Frame, PackedParameter, StorageTable, is_weight, written_to
from ascend_core.storage import bring_back, hollow, version_of
from ascend_recompute._digest import digest
from ascend_recompute._structure import CallStructure, leaves_of

__all__ = ["Replay", "is_worthwhile", "runs_again_anyway"]

# Devices without a state of their own to capture.
_BARE = ("cpu", "meta")

Hooks = tuple[Callable[[Tensor], object], Callable[[Any], Tensor]]


class Slot:
    """Stands for one tensor that the function's graph saved.

    Attributes:
        replay: The call that it belongs to.
        size: Of the tensor.
        dtype: Of the tensor.
        probe: Shares the version counter of the tensor and holds no bytes; None where a tensor
            cannot be hollowed (sparse, a subclass).
        version: The version at which the tensor was saved.
        digest: Of the tensor, when what the second run saves is compared with it.
        value: The tensor, between the second run and the moment when backward takes it.
    """

    __slots__ = ("__weakref__", "digest", "dtype", "probe", "replay", "size", "value", "version")

    def __init__(self, replay: Replay, tensor: Tensor) -> None:
        self.replay = replay
        self.size = tensor.size()
        self.dtype = tensor.dtype
        self.probe = hollow(tensor) if Layout.fits(tensor) else None
        self.version = version_of(tensor)
        self.digest = _digest_of(tensor) if replay.verify else None
        self.value: Tensor | None = None

    def check(self) -> None:
        """Raise autograd's own error when the tensor was written to after it was saved."""
        if self.probe is not None and version_of(self.probe) != self.version:
            raise written_to(self.probe, self.size, self.version)


class _Output(NamedTuple):
    """Which output of an earlier replay an argument is.

    Attributes:
        place: Its place among the outputs, flattened.
        requires_grad: Whether the function saw it so.
    """

    place: int
    requires_grad: bool


class Replay:
    """One call of a function: run forward now, and again when backward needs it.

    Attributes:
        label: The name of what is called, for errors.
        verify: Whether what the second run saves is compared with what the first one did.
        dropped_bytes: How many bytes of storages the graph saved, that now nobody holds; the
            arguments are held, and the parameters.
        inputs: The tensors among the arguments, without their graph.
        since: Autograd's sequence number when the call began: nodes from there on are its own.
        lock: Held while the function runs again; two threads of the engine may ask at once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        context_fn: ContextFactory | None = None,
        before: Replay | None = None,
        label: str | None = None,
        verify: bool = False,
        early_stop: bool = False,
    ) -> None:
        self._function = function
        self._early_stop = early_stop
        self.label = _name(function) if label is None else label
        self.verify = verify
        leaves, self._structure = CallStructure.of(args, kwargs)
        self._arguments = [_argument(value, before) for value in leaves]
        self.inputs = [value for value in self._arguments if isinstance(value, Tensor)]
        # What the function reads, with the version at which it did.
        self._reads = [
            (value if isinstance(kept, Tensor) else hollow(value), version_of(value))
            for value, kept in zip(leaves, self._arguments, strict=True)
            if isinstance(value, Tensor)
        ]
        self._before = before if any(isinstance(v, _Output) for v in self._arguments) else None
        self._outputs: list[tuple[Any, Layout, int] | None] = []
        self._gave: list[Tensor | None] = []
        self._state = _state_before(leaves, context_fn)
        self.dropped_bytes = 0
        self._seen = StorageTable()
        self._slots: list[weakref.ref[Slot]] = []
        self.since: int = torch._C._autograd._get_sequence_nr()
        self.lock = threading.RLock()
        self._in_forward = False

    @property
    def has_slots(self) -> bool:
        """Whether the graph saved anything that it now asks this replay for."""
        return bool(self._slots)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the caller's own arguments."""
        self._in_forward = True
        for value in filter(Layout.fits, self.inputs):
            self._seen.track(value).made = self
        try:
            with saved_tensors_hooks(self._leave_slot, _value_of):
                outputs = self._function(*args, **kwargs)
        finally:
            self._in_forward = False
            self._seen.clear()
        flat = leaves_of(outputs)
        leaves = _leaves(flat, self.since)
        self._reads += [(leaf, version_of(leaf)) for leaf in leaves]
        self._outputs = [_identity(value) for value in flat]
        if self.verify:
            self._gave = [_digest_of(value) for value in flat]
        return outputs

    def output(self, tensor: Tensor) -> int | None:
        """Which of the function's outputs a tensor is, as it was returned."""
        if not Layout.fits(tensor):
            return None
        wanted = tensor.untyped_storage(), read(tensor), version_of(tensor)
        for index, identity in enumerate(self._outputs):
            if identity is not None and (identity[0](), *identity[1:]) == wanted:
                return index
        return None

    def again(self) -> list[Any]:
        """Run the function again, to its end, and fill the slots.

        Returns:
            Its outputs, flattened, without a graph.

        Raises:
            RuntimeError: When something that it reads was modified in place since the forward.
            ReplayError: When the function saved other tensors than in forward.
        """
        with self.lock:
            collected = _Collected()
            outputs = leaves_of(self._run_again(collected))
            self._fill(collected)
            self._compare(outputs)
        return [value.detach() if isinstance(value, Tensor) else value for value in outputs]

    def _run_again(self, collected: _Collected) -> Any:
        for value, version in self._reads:
            if version_of(value) != version:
                raise written_to(value, value.size(), version)
        for value in self.inputs:
            bring_back(value)
        args, kwargs = self._structure.call(self._again_arguments())
        with (
            torch.enable_grad(),
            self._state.replaying(),
            saved_tensors_hooks(collected.pack, _as_packed),
        ):
            try:
                return self._function(*args, **kwargs)
            except BaseException as error:
                if not collected.was_enough_for(error):
                    raise
        return None

    def _again_arguments(self) -> list[Any]:
        """The arguments; those that an earlier replay makes are made again."""
        if self._before is None:
            return self._arguments
        made = self._before.again()
        return [
            made[value.place].requires_grad_(value.requires_grad)
            if isinstance(value, _Output)
            else value
            for value in self._arguments
        ]

    def share(self, replayed: Tensor, restored: Tensor) -> None:
        """Let slots that look at the storage of `replayed` look at that of `restored` instead."""
        storage = replayed.untyped_storage()
        for slot in filter(None, (reference() for reference in self._slots)):
            value = slot.value
            if value is None or not Layout.fits(value) or value.untyped_storage() is not storage:
                continue
            slot.value = read(value).look_at(restored)

    def take(self, slot: Slot) -> Tensor:
        """The saved tensor of a slot. Runs the function again when the slot is empty."""
        with self.lock:
            slot.check()
            if slot.value is None:
                self._refill()
            value, slot.value = slot.value, None
            assert value is not None
            return value

    def _leave_slot(self, tensor: Tensor) -> Slot | PackedParameter:
        if isinstance(tensor, Parameter):
            return PackedParameter(tensor)
        slot = Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        if Layout.fits(tensor) and not is_weight(tensor):
            self._count(tensor)
        node = tensor.grad_fn
        if slot.probe is not None and node is not None and node._sequence_nr() < self.since:
            self._reads.append((slot.probe, slot.version))
        return slot

    def _count(self, tensor: Tensor) -> None:
        record = self._seen.track(tensor)
        if record.made is None:
            record.made = self
            self.dropped_bytes += tensor.untyped_storage().nbytes()

    def _refill(self) -> None:
        """Run the function again for its slots alone."""
        if self._early_stop:
            collected = _Collected(self._wanted())
            self._run_again(collected)
            if not self.verify:
                self._fill(collected)
                return
        self.again()

    def _wanted(self) -> int:
        """How many of the saved tensors somebody may still ask for, those before them included."""
        alive = [place for place, slot in enumerate(self._slots, 1) if slot() is not None]
        return alive[-1]

    def _fill(self, collected: _Collected) -> None:
        if self._in_forward:  # the function takes a gradient itself, before it has saved all
            del collected[len(self._slots) :]
        wanted = len(self._slots) if collected.enough is None else collected.enough
        if len(collected) != wanted:
            raise self._differs(f"{len(self._slots)} tensors", str(len(collected)))
        for reference, value in zip(self._slots, collected, strict=False):
            slot = reference()
            if slot is None:
                continue
            if (value.size(), value.dtype) != (slot.size, slot.dtype):
                raise self._differs(
                    f"a tensor of {list(slot.size)} {slot.dtype}",
                    f"one of {list(value.size())} {value.dtype}",
                )
            if slot.digest is not None and not torch.equal(digest(value), slot.digest):
                raise self._differs(f"a tensor of {list(slot.size)}", "one with other values")
            slot.value = value

    def _compare(self, outputs: list[Any]) -> None:
        """Raise when the function gave other outputs than in forward. Only with `verify`."""
        for before, value in zip(self._gave, outputs, strict=False):
            if before is None:
                continue
            now = _digest_of(value)
            if now is None or not torch.equal(now, before):
                raise self._differs("one output", "another", gave="gave")

    def _differs(self, before: str, now: str, gave: str = "saved") -> ReplayError:
        to_the_end = "leave early_stop out, or "
        return ReplayError(
            f"{self.label} {gave} {before} in forward and {now} when it ran again.",
            why="it depends on something that changed between forward and backward.",
            instead=f"{to_the_end if self._early_stop else ''}make it depend on its arguments, "
            "random state and autocast mode alone, or pass a context_fn that restores the rest.",
        )


class _Enough(BaseException):
    """Ends the second run; no error, so that no `except Exception` of the function stops it."""


class _Collected(list[Tensor]):
    """What the second run saves, in order.

    Attributes:
        enough: With how many the run may end; None where it has to run to its end.
    """

    def __init__(self, enough: int | None = None) -> None:
        super().__init__()
        self.enough = enough

    def pack(self, tensor: Tensor) -> Tensor:
        # Its graph keeps the value too: the function may take a gradient itself.
        saved = tensor.detach()
        if isinstance(tensor, Parameter):
            return saved
        if not self._is_full():
            self.append(saved)
        if self._is_full():
            raise _Enough
        return saved

    def was_enough_for(self, error: BaseException) -> bool:
        """Whether an exception ended a run that had saved all that is wanted.

        It need not be `_Enough`: the function, or TorchScript, may have made another one of it.
        """
        return self._is_full() and not isinstance(error, (KeyboardInterrupt, SystemExit))

    def _is_full(self) -> bool:
        return self.enough is not None and len(self) >= self.enough


def _state_before(leaves: list[Any], context_fn: ContextFactory | None) -> ForwardState:
    """What a call of arguments with these leaves is about to run under."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    devices = {device for device in devices if device.type not in _BARE}
    return ForwardState.capture(devices=devices, context_fn=context_fn)


def is_worthwhile() -> bool:
    """Whether leaving out what is saved is possible here, and saves anything."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        and not runs_again_anyway()
    )


def runs_again_anyway() -> bool:
    """Whether somebody further out runs again what runs now: a replay or torch's checkpoint.

    They (torch's in its non-reentrant form) keep nothing that is saved meanwhile, and count on
    being offered the same tensors in both runs.
    """
    pack = _pack_hook_below_frames()
    return (
        isinstance(getattr(pack, "__self__", None), (Replay, _Collected))
        or getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    )


def _pack_hook_below_frames() -> Callable[[Tensor], object] | None:
    """The hook that gets what is saved now, and that no keeper claims."""
    pair: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while pair is not None:
        owner = getattr(pair[0], "__self__", None)
        if not isinstance(owner, Frame):
            return pair[0]
        pair = owner.below
    return None


def _leaves(outputs: list[Any], since: int) -> list[Tensor]:
    """The leaves that require grad in which the part of the graph made since then ends."""
    found: list[Tensor] = []
    nodes = [value.grad_fn for value in outputs if isinstance(value, Tensor)]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif node._sequence_nr() >= since:
            further = {following for following, _ in node.next_functions} - seen
            seen |= further
            nodes += further
    return found


def _argument(value: Any, before: Replay | None) -> Any:
    """The argument as the function may see it again: same storage, no graph behind it."""
    if type(value) is not Tensor:
        return value
    index = None if before is None else before.output(value)
    if index is not None:
        return _Output(index, value.requires_grad)
    return value.detach().requires_grad_(value.requires_grad)


def _identity(value: Any) -> tuple[Any, Layout, int] | None:
    """What tells an output from others, without holding it."""
    if not isinstance(value, Tensor) or not Layout.fits(value):
        return None
    return weakref.ref(value.untyped_storage()), read(value), version_of(value)


def _value_of(packed: Slot | PackedParameter) -> Tensor:
    return packed.replay.take(packed) if isinstance(packed, Slot) else packed.get()


def _as_packed(tensor: Tensor) -> Tensor:
    return tensor


def _digest_of(value: Any) -> Tensor | None:
    return digest(value) if isinstance(value, Tensor) and Layout.fits(value) else None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
