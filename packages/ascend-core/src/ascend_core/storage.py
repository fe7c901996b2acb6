"""Giving back the bytes of a tensor that autograd goes on holding, and putting them back.

`release` frees the storage below the tensor: the tensor object, its shape and its place in the
graph stay, and every view of it stays a view. `Released.restore` puts the bytes back where every
view sees them; no version counter moves, since autograd must not think that a value changed.

[Note: a freed tensor must not be read]
On CPU a kernel that reads a storage of no bytes ends the process with signal 11. Two things stand
before that while the bytes are away. The tensor that was given to `release` has a class whose
every operation raises; other views that the caller made before cannot be protected in this way.
And one bit of its version counter, which all views share, is set: where autograd saved the tensor
or a view of it and nobody restored it, backward raises autograd's own error about a modification
in place. Restoring puts the counter back to where it was; `version_of` does not see the bit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ascend_core.errors import StorageError
from ascend_core.layout import Layout, fills_storage, read

__all__ = [
    "Released",
    "bring_back",
    "hollow",
    "is_released",
    "release",
    "share_version",
    "version_of",
    "why_not_releasable",
]

# Where a storage object keeps its `Released`.
_MARK = "_ascend_released"
# Set in the version counter of a tensor while its bytes are away.
_AWAY = 1 << 30
# Set for a moment, to see who else sees it; one thread at a time.
_PROBE = 1 << 29
_PROBING = threading.Lock()

# What reads no element; `__get__` is every property.
_HARMLESS = frozenset({
    "__get__", "__len__", "backward", "data_ptr", "dim", "element_size", "get_device", "grad",
    "is_complex", "is_contiguous", "is_floating_point", "is_inference", "ndimension", "nelement",
    "numel", "register_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride",
    "untyped_storage",
})  # fmt: skip


class _ReleasedTensor(Tensor):
    """The class of a tensor while its bytes are away."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let through what neither reads an element nor hands out another view; refuse the rest."""
        if getattr(function, "__name__", "") in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **(kwargs or {}))
            if isinstance(result, _ReleasedTensor) or not _sees_released(result):
                return result
        raise StorageError(
            f"{getattr(function, '__name__', function)} reads a tensor whose storage was released.",
            why="its bytes were given back until backward, where they are computed again.",
            instead="use the tensor before it is discarded, or use the form that rebuilds saved "
            "values (recompute_activation), which leaves tensors alone.",
        )


class Released:
    """A storage whose bytes were given back.

    [Note: who holds what]
    The storage object itself holds its `Released`, which holds whoever can restore it and knows
    the storage only weakly. So when the last tensor that sees the storage goes (the backward
    never came, say), everything that was kept for the restoration goes with it.

    Attributes:
        nbytes: How many bytes were given back.
    """

    def __init__(
        self, tensor: Tensor, on_demand: Callable[[], None] | None, counter: Tensor | None
    ) -> None:
        storage = tensor.untyped_storage()
        self._storage = weakref.ref(storage)
        self._layout = read(tensor)
        self._owner = weakref.ref(tensor)
        self._class = type(tensor)
        self._counter = hollow(tensor) if counter is None else counter
        self._version = tensor._version
        self._on_demand = on_demand
        self.nbytes = storage.nbytes()
        storage.resize_(0)
        tensor.__class__ = _ReleasedTensor
        _set_version(self._counter, self._version | _AWAY)
        storage.__dict__[_MARK] = self

    def restore(self, values: Tensor) -> Tensor | None:
        """Put the bytes back. Allocates `nbytes` on the tensor's device.

        Args:
            values: The same shape and dtype as the released tensor; read once, not kept.

        Returns:
            What the tensor is again, as an alias with a version counter of its own; None when
            the bytes were back already, or nothing sees the storage any more.

        Raises:
            StorageError: When shape or dtype differ; the storage stays released.
        """
        storage = self._storage()
        if storage is None or storage.__dict__.get(_MARK) is not self:
            return None
        layout = self._layout
        if values.size() != layout.size or values.dtype != layout.dtype:
            raise StorageError(
                f"a released tensor of {list(layout.size)} {layout.dtype} cannot be restored from "
                f"one of {list(values.size())} {values.dtype}.",
                why="the function gave another result when it ran again.",
                instead="make it depend on its arguments, random state and autocast mode alone.",
            )
        storage.resize_(self.nbytes)
        with torch.no_grad():
            # What is written through an alias with a counter of its own is no change.
            alias: Tensor = self._counter.new_empty(0)
            alias.set_(storage, layout.offset, layout.size, layout.stride).copy_(values)
        del storage.__dict__[_MARK]
        _set_version(self._counter, self._version)
        owner = self._owner()
        if owner is not None:
            owner.__class__ = self._class
        return alias

    def bring_back(self) -> None:
        """Have whoever released the storage restore it now.

        Raises:
            StorageError: When nobody can.
        """
        if self._on_demand is not None:
            self._on_demand()
        storage = self._storage()
        if storage is not None and storage.__dict__.get(_MARK) is self:
            raise StorageError(
                f"the released storage of a tensor of {list(self._layout.size)} is needed now.",
                why="whoever released it cannot restore it at this moment.",
                instead="restore it first.",
            )


def release(
    tensor: Tensor,
    *,
    on_demand: Callable[[], None] | None = None,
    counter: Tensor | None = None,
) -> Released:
    """Give back the bytes of a tensor. Frees its storage; the tensor and its views stay.

    Args:
        tensor: Solely owns its storage: strided, dense, from the storage's first byte to its last.
        on_demand: Restores the storage; `bring_back` calls it when something else needs the
            bytes. Held for as long as the storage lives and is not restored.
        counter: What `hollow` made of the tensor, where the caller has that already.

    Raises:
        StorageError: When the tensor does not solely own its storage, with the reason.
    """
    reason = why_not_releasable(tensor)
    if reason is not None:
        raise StorageError(
            f"the storage of a tensor of {list(tensor.size())} cannot be released.",
            why=reason,
            instead="leave this tensor alone; nothing was freed.",
        )
    return Released(tensor, on_demand, counter)


def why_not_releasable(tensor: Tensor, others: Iterable[Tensor] = ()) -> str | None:
    """Why the tensor's storage must stay, or None when it can be released.

    Args:
        tensor: The tensor whose storage might be released.
        others: Tensors that must stay readable, such as the inputs that it was made from.
    """
    if type(tensor) is not Tensor:
        return f"it is a {type(tensor).__name__}, which lives on after backward."
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout is {tensor.layout}."
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negative of what its storage holds."
    if tensor.is_leaf and tensor.requires_grad:
        return "it is a leaf that requires grad."
    if tensor.numel() == 0:
        return "it has no bytes."
    storage = tensor.untyped_storage()
    if tensor.storage_offset() != 0 or not fills_storage(tensor):
        return "it is a view of a larger storage, which others may read."
    # (`is_shared` is always true on CUDA.)
    if not storage.resizable() or (tensor.is_cpu and storage.is_shared()):
        return "its storage cannot be resized (it is shared memory or belongs to another library)."
    if any(_shares(storage, other) for other in others):
        return "it shares its storage with an input, a parameter or another output."
    return None


def is_released(tensor: Tensor) -> bool:
    """Whether the bytes of the tensor's storage are away."""
    return _released(tensor) is not None


def bring_back(tensor: Tensor) -> None:
    """Restore the tensor's storage when it is released; do nothing when it is not."""
    released = _released(tensor)
    if released is not None:
        released.bring_back()


def version_of(tensor: Tensor) -> int:
    """The tensor's version counter, the same whether its bytes are away or not, or it is probed.

    0 for an inference tensor, which has none.
    """
    return 0 if tensor.is_inference() else tensor._version & ~(_AWAY | _PROBE)


def hollow(tensor: Tensor) -> Tensor:
    """An alias that shares the version counter of `tensor` and holds none of its bytes."""
    # Function modes that watch writes through `.data` must not take this for one.
    with torch._C.DisableTorchFunction():
        probe = tensor.detach()
        probe.data = tensor.new_empty(0)
    return probe


def share_version(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors share one version counter, as views of one tensor do.

    Where they do not (one was made by way of `.data`, or from the storage), a write through one is
    not seen by the other's counter, though both see the same bytes.

    For a moment the counter of `left` is another one. `version_of` does not see that; a backward on
    another thread that needs the very tensor at that moment might, unless it is in a region.
    """
    with _PROBING:
        version = left._version
        _set_version(left, version ^ _PROBE)
        seen = right._version
        _set_version(left, version)
        return bool(seen != right._version)


def _set_version(tensor: Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _released(tensor: Tensor) -> Released | None:
    if not Layout.fits(tensor) and type(tensor) is not _ReleasedTensor:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        released: Released | None = tensor.untyped_storage().__dict__.get(_MARK)
    return released


def _sees_released(value: Any) -> bool:
    return isinstance(value, Tensor) and is_released(value)


def _shares(storage: torch.UntypedStorage, other: Tensor) -> bool:
    return other.layout is torch.strided and other.untyped_storage() is storage
