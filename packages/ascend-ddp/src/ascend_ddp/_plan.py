"""Which gradients travel together: pure arithmetic, without torch.

A bucket is one flat tensor. Each parameter has a slot in it, which begins at a multiple of GRID
elements, and the bucket ends at a multiple of GRID elements for each rank. So where a bucket is
cut into as many parts as there are ranks, each part begins at a multiple of GRID elements of the
parameter that it cuts: torch's fused optimizers round the elements off that grid differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["GRID", "BucketPlan", "Size", "Slot", "plan_buckets"]

GRID = 64


class Size(NamedTuple):
    """A parameter, as far as a plan is concerned.

    Attributes:
        name: In the model.
        numel: Number of elements.
        itemsize: Bytes of an element of its gradient, as it travels.
        kind: Dtype and device of its gradient: only those of one kind share a bucket.
    """

    name: str
    numel: int
    itemsize: int
    kind: tuple[str, str]


class Slot(NamedTuple):
    """Where in its bucket a parameter's gradient is, in elements."""

    parameter: int
    begin: int
    numel: int


class BucketPlan(NamedTuple):
    """One bucket: its slots in the order in which they are filled, and its elements in all."""

    slots: tuple[Slot, ...]
    numel: int


def plan_buckets(
    sizes: Mapping[int, Size], order: Sequence[int], bucket_bytes: int, ranks: int
) -> tuple[BucketPlan, ...]:
    """Put parameters into buckets.

    Args:
        sizes: Of each parameter that takes part, by its index.
        order: Indices in the order in which gradients become ready; those that it lacks come
            behind, from the last to the first.
        bucket_bytes: A bucket that has so many bytes is full.
        ranks: Into how many parts a bucket can be cut.

    Returns:
        The buckets, in the order in which they become full.
    """
    known = [index for index in order if index in sizes]
    left = sorted(sizes.keys() - set(known), reverse=True)
    opened: dict[tuple[str, str], list[int]] = {}
    closed: list[list[int]] = []
    for index in known + left:
        size = sizes[index]
        bucket = opened.setdefault(size.kind, [])
        held = sum(sizes[one].numel for one in bucket)
        if bucket and (held + size.numel) * size.itemsize > bucket_bytes:
            closed.append(bucket)
            bucket = opened[size.kind] = []
        bucket.append(index)
    place = {index: number for number, index in enumerate(known + left)}
    closed += opened.values()
    closed.sort(key=lambda bucket: place[bucket[-1]])
    return tuple(_laid_out(bucket, sizes, ranks) for bucket in closed)


def _laid_out(indices: Sequence[int], sizes: Mapping[int, Size], ranks: int) -> BucketPlan:
    slots, end = [], 0
    for index in indices:
        slots.append(Slot(index, end, sizes[index].numel))
        end = _rounded(end + sizes[index].numel, GRID)
    return BucketPlan(tuple(slots), _rounded(end, GRID * ranks))


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
