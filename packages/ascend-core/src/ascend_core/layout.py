"""How a strided tensor lies in its storage, apart from the storage itself."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn

from ascend_core.errors import ConfigError

__all__ = ["Layout", "fills_storage", "read"]

# Looked up once: this is asked for every tensor of every recorded call.
_PLAIN = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided


class Layout(NamedTuple):
    """What makes one particular tensor of a storage.

    Attributes:
        size: The shape.
        stride: In elements; 0 where a dimension was expanded.
        offset: Where the first element lies in the storage, in elements.
        dtype: The type of an element.
        conjugate: Whether the tensor is the lazy conjugate of what lies in the storage.
        negative: Whether the tensor is the lazy negative of what lies in the storage.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Read the layout of a tensor.

        Raises:
            ConfigError: When `Layout.fits` says no.
        """
        if not cls.fits(tensor):
            raise ConfigError(
                f"a {type(tensor).__name__} of layout {tensor.layout} cannot be moved.",
                why="it is not one strided view of one storage.",
                instead="leave it where it is, or move the tensors that it is made of.",
            )
        return read(tensor)

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Whether a layout says all about the tensor beside its storage.

        It does not for sparse, nested and quantised tensors, nor for subclasses, which may wrap
        other tensors or carry state of their own.
        """
        return (
            type(tensor) in _PLAIN
            and tensor.layout is _STRIDED
            and not tensor.is_quantized
            and not tensor.is_nested
        )

    def look_at(self, tensor: torch.Tensor) -> torch.Tensor:
        """View the storage of `tensor` in this layout.

        Args:
            tensor: Any view of the storage, of any shape; grad recording is off.

        Returns:
            A tensor of this size and dtype over the same storage; `tensor` itself when it already
            looks like that.
        """
        return tensor if read(tensor) == self else self.over(tensor.untyped_storage())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """View a storage in this layout.

        Args:
            storage: Large enough for it; grad recording is off.

        Returns:
            A tensor of this size and dtype, with a version counter of its own.
        """
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = whole.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            view = view.conj()
        return torch._neg_view(view) if self.negative else view

    @property
    def span(self) -> int:
        """Elements of the storage from the first to the last one that the tensor sees.

        Counts the gaps between them, and an expanded element once.
        """
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of `span`."""
        return self.span * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the span has no gaps, and each of its elements belongs to one of the tensor."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    def flatten(self, tensor: torch.Tensor, *, whole_storage: bool = False) -> torch.Tensor:
        """View what lies in the storage of `tensor`, which has this layout, as one dimension.

        Args:
            tensor: The tensor whose layout this is.
            whole_storage: View all of the storage, not only the span of the tensor.

        Returns:
            A view of shape [span], or of as many elements as the storage has. Detached.
        """
        stored = tensor.detach()
        if self.negative:
            stored = torch._neg_view(stored)
        if self.conjugate:
            stored = stored.conj()
        if whole_storage:
            count = tensor.untyped_storage().nbytes() // self.dtype.itemsize
            return stored.as_strided((count,), (1,), 0)
        return stored.as_strided((self.span,), (1,), self.offset)

    def rebuild(self, stored: torch.Tensor, first: int) -> torch.Tensor:
        """Make the tensor again, as a view of `stored`.

        Args:
            stored: A contiguous tensor of one dimension and of this dtype, or one that can be
                viewed as it.
            first: The byte of the tensor's old storage that `stored` begins with.

        Returns:
            A view with this size and stride. Its offset is where its first element lies now.
        """
        typed = stored if stored.dtype == self.dtype else stored.view(self.dtype)
        begin = cast("int", typed.storage_offset()) + self.offset - first // self.dtype.itemsize
        tensor = typed.as_strided(self.size, self.stride, begin)
        if self.conjugate:
            tensor = tensor.conj()
        if self.negative:
            tensor = torch._neg_view(tensor)
        return tensor


def read(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor that is known to fit; `Layout.of` without its check."""
    fields = (
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
    return tuple.__new__(Layout, fields)  # (`Layout(...)` goes by way of a function in Python)


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether each byte of the tensor's storage belongs to exactly one of its elements."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and (
        tensor.is_contiguous() or read(tensor).is_dense
    )
