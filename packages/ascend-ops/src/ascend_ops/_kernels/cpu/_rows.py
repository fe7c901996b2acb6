"""Tensors as kernels.c sees them: rows of elements that are beside one another."""

from __future__ import annotations

from torch import Tensor

__all__ = ["rows_of"]


def rows_of(tensor: Tensor, columns: int) -> tuple[Tensor, int]:
    """See a tensor as rows, with one stride from each to the next.

    Args:
        tensor: Of any shape and strides, with at least one element.
        columns: The length of a row: the product of the sizes of the last dimensions.

    Returns:
        The tensor, or a contiguous copy where it cannot be seen so; and the stride, in elements.
    """
    if tensor.is_contiguous():
        return tensor, columns
    stride = _stride(tensor, columns)
    return (tensor.contiguous(), columns) if stride is None else (tensor, stride)


def _stride(tensor: Tensor, columns: int) -> int | None:
    within, between = 1, None
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if within < columns:
            if stride != within:
                return None
        elif between is None:
            between = stride
        elif stride != between * (within // columns):
            return None
        within *= size
    return columns if between is None else between
