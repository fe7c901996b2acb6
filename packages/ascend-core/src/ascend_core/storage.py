"""Giving back the bytes of a tensor that autograd goes on holding, and putting them back.

`release` frees the storage below the tensor: the tensor object, its shape and its place in the
graph stay, and every view of it stays a view. `Released.restore` puts the bytes back where every
view sees them; no version counter moves, since autograd must not think that a value changed.

[Note: a freed tensor must not be read]
On CPU a kernel that reads a storage of no bytes ends the process with signal 11. While its bytes
are away, the tensor that was given to `release` has a class whose every operation raises instead;
other views of the same storage that the caller made cannot be protected in this way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ascend_core.errors import StorageError

__all__ = ["Released", "bring_back", "is_released", "release", "why_not_releasable"]

_HARMLESS = frozenset({
    "__get__", "backward", "data_ptr", "dim", "element_size", "is_complex", "is_contiguous",
    "is_floating_point", "nelement", "numel", "register_hook", "requires_grad_", "retain_grad",
    "size", "storage_offset", "stride", "untyped_storage",
})  # fmt: skip


class _ReleasedTensor(Tensor):
    """The class of a tensor while its bytes are away."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let through what reads no element; refuse the rest."""
        if getattr(function, "__name__", "") in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise StorageError(
            f"{getattr(function, '__name__', function)} reads a tensor whose storage was released.",
            why="its bytes were given back until backward, where they are computed again.",
            instead="use the tensor before it is discarded, or use the form that rebuilds saved "
            "values (recompute_activation), which leaves tensors alone.",
        )


class Released:
    """A storage whose bytes were given back.

    Attributes:
        nbytes: How many bytes were given back.
        alias: Sees the storage as the tensor does, with a version counter of its own.
    """

    def __init__(self, tensor: Tensor, on_demand: Callable[[], None] | None) -> None:
        # An alias with a version counter of its own: what is written through it is no change.
        with torch.no_grad():
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage = tensor.untyped_storage()
            self.alias = alias.set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        self._owner = weakref.ref(tensor)
        self._class = type(tensor)
        self._storage = storage
        self.nbytes = storage.nbytes()
        # Weakly: whoever can restore this storage usually holds this object.
        self._on_demand = None if on_demand is None else weakref.WeakMethod(on_demand)
        storage.resize_(0)
        tensor.__class__ = _ReleasedTensor
        _mark(storage, self)

    @property
    def restored(self) -> bool:
        """Whether the bytes are back."""
        return self._storage.nbytes() == self.nbytes

    def restore(self, values: Tensor) -> None:
        """Put the bytes back. Allocates `nbytes` on the tensor's device.

        Args:
            values: The same shape and dtype as the released tensor; read once, not kept.

        Raises:
            StorageError: When shape or dtype differ; the storage stays released.
        """
        if self.restored:
            return
        alias = self.alias
        if values.size() != alias.size() or values.dtype != alias.dtype:
            raise StorageError(
                f"a released tensor of {list(alias.size())} {alias.dtype} cannot be restored from "
                f"one of {list(values.size())} {values.dtype}.",
                why="the function gave another result when it ran again.",
                instead="make it depend on its arguments, random state and autocast mode alone.",
            )
        self._storage.resize_(self.nbytes)
        with torch.no_grad():
            alias.copy_(values)
        _mark(self._storage, None)
        owner = self._owner()
        if owner is not None:
            owner.__class__ = self._class

    def bring_back(self) -> None:
        """Have whoever released the storage restore it now."""
        restorer = None if self._on_demand is None else self._on_demand()
        if not self.restored and restorer is not None:
            restorer()


def release(tensor: Tensor, *, on_demand: Callable[[], None] | None = None) -> Released:
    """Give back the bytes of a tensor. Frees its storage; the tensor and its views stay.

    Args:
        tensor: Solely owns its storage: strided, dense, from the storage's first byte to its last.
        on_demand: A bound method that restores the storage, held weakly; `bring_back` calls it
            when something else needs the bytes.

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
    return Released(tensor, on_demand)


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
    if tensor.is_leaf and tensor.requires_grad:
        return "it is a leaf that requires grad."
    storage = tensor.untyped_storage()
    covered = tensor.numel() * tensor.element_size()
    if tensor.storage_offset() != 0 or storage.nbytes() != covered or not _is_dense(tensor):
        return "it is a view of a larger storage, which others may read."
    if not storage.resizable():
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


def _mark(storage: torch.UntypedStorage, released: Released | None) -> None:
    """Note on the storage object itself who can restore it: it lives as long as the storage."""
    storage.__dict__["_ascend_released"] = None if released is None else weakref.ref(released)


def _released(tensor: Tensor) -> Released | None:
    if tensor.layout is not torch.strided:
        return None
    reference = tensor.untyped_storage().__dict__.get("_ascend_released")
    return None if reference is None else reference()


def _is_dense(tensor: Tensor) -> bool:
    """Whether each byte of the covered range belongs to exactly one element."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _shares(storage: torch.UntypedStorage, other: Tensor) -> bool:
    return other.layout is torch.strided and other.untyped_storage() is storage
