"""How a tensor looks at its storage."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Size, strides and offset (in elements) of a view, and the dtype it reads the storage with."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of `tensor`."""
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that the view names, counted once for each name."""
        return self.size.numel() * self.dtype.itemsize

    def look_at(self, tensor: Tensor) -> Tensor:
        """View the storage of `tensor` in this layout.

        Args:
            tensor: Any view of the storage, of any shape; no grad is recorded.

        Returns:
            A tensor of `self.size` and `self.dtype` over the same storage; `tensor` itself when
            it already looks like that.
        """
        if tensor.dtype != self.dtype:
            whole = torch.empty(0, dtype=self.dtype, device=tensor.device)
            return whole.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)
        if (
            tensor.size() == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
        ):
            return tensor
        return tensor.as_strided(self.size, self.stride, self.offset)
