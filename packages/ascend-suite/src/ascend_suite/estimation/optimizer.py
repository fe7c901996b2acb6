"""What the optimizer keeps, and what its step takes. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_suite.estimation.kernels import Kernels
from ascend_suite.plan import Plan
from ascend_suite.shape import ModelShape

__all__ = ["OptimizerBytes", "moments", "optimizer_bytes"]

_GRID = 64
"""Windows are cut on a grid of so many elements."""
_CHUNK = 2 * 2**20
"""Elements that reuse-fp32-param splits or joins at once, by torch's operators."""


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """An optimizer's bytes on one device.

    Attributes:
        kept: Between steps, by kind: "masters", "moments", "residuals".
        working: More in a step.
        host: On the host.
    """

    kept: Mapping[str, int]
    working: int
    host: int = 0


def moments(shape: ModelShape) -> int:
    """How many values the optimizer keeps for each parameter."""
    return {"adamw": 2, "momentum": 1, "sgd": 0}[shape.optimizer]


def optimizer_bytes(
    shape: ModelShape, plan: Plan, kernels: Kernels, sizes: Sequence[int], *, on_host: bool
) -> OptimizerBytes:
    """Say what an optimizer keeps and takes.

    Args:
        shape: The model and its training.
        plan: The features that are on.
        kernels: What the device's operators take.
        sizes: Elements of each parameter that this rank steps.
        on_host: Whether there is a host to move state to.
    """
    reuse, swap = plan.features.get("reuse-fp32-param"), plan.features.get("swap-optimizer")
    if reuse is not None and shape.item_bytes == 2:
        return _reused(shape, reuse, kernels, sizes)
    masters = shape.masters and shape.item_bytes == 2
    if swap is not None:
        masters = masters or (swap.master_weights and shape.item_bytes == 2)
    state = 4 if masters else shape.item_bytes
    if swap is not None and on_host:
        return _swapped(shape, swap, kernels, sizes, masters=masters)
    kept = {
        "moments": moments(shape) * _sum(kernels, sizes, state),
        "masters": _sum(kernels, sizes, 4) if masters else 0,
    }
    if shape.optimizer == "adamw":
        # `step` counts in FP32, on the host where the step is not fused.
        kept["moments"] += 4 * len(sizes) if kernels.unit == 1 else 0
    # Masters are stepped with FP32 copies of the gradients.
    copies = _sum(kernels, sizes, 4) if masters else 0
    return OptimizerBytes(kept, copies + _temporaries(shape, kernels, sizes, state))


def _temporaries(shape: ModelShape, kernels: Kernels, sizes: Sequence[int], item: int) -> int:
    """What AdamW allocates: the root of the second moment, and that divided and shifted.

    Stepped all at once (foreach): one root for each parameter, worked on in place. One by one: root
    and quotient of a parameter, while the quotient of the one before it still has a name.
    """
    if shape.optimizer != "adamw" or shape.fused_step:
        return 0
    if kernels.foreach:
        return _sum(kernels, sizes, item)
    blocks = [kernels.block(size * item) for size in sizes]
    before = [0, *blocks[:-1]]
    return max(last + 2 * block for last, block in zip(before, blocks, strict=True))


def _swapped(
    shape: ModelShape, config: Any, kernels: Kernels, sizes: Sequence[int], *, masters: bool
) -> OptimizerBytes:
    """swap-optimizer: a ring of three windows and scratch for one, in a step only."""
    each = (moments(shape) + masters) * (4 if masters else shape.item_bytes)
    window = _window(sum(sizes), config.times, config.window_bytes, each)
    windows = -(-sum(sizes) // window)
    ring = min(3, windows) * kernels.block(each * window)
    scratch = kernels.block((7 if masters else 2 * shape.item_bytes) * window)
    if config.offload_gradients:
        scratch += 2 * kernels.block(shape.item_bytes * window)
    item = 4 if masters else shape.item_bytes
    unfused = shape.optimizer == "adamw" and not shape.fused_step
    temporaries = kernels.block(item * window) if unfused else 0
    host = each * sum(sizes) + (shape.item_bytes * sum(sizes) if config.offload_gradients else 0)
    return OptimizerBytes({}, ring + scratch + temporaries, host)


def _reused(
    shape: ModelShape, config: Any, kernels: Kernels, sizes: Sequence[int]
) -> OptimizerBytes:
    """reuse-fp32-param: 16 bits beside each weight instead of a master of 32."""
    count = sum(sizes)
    kept = {
        "moments": moments(shape) * _sum(kernels, sizes, 4),
        "residuals": _sum(kernels, sizes, 2) + count // 512,
    }
    bitmaps = count // 8
    one_kernel = kernels.unit == 1 and config.kernels in ("auto", "native")
    if one_kernel:
        return OptimizerBytes(kept, bitmaps)
    window = _window(count, config.windows(joins=True), config.window_bytes, 4)
    joined = 4 * window + 4 * window + 24 * min(window, _CHUNK)
    return OptimizerBytes(kept, bitmaps + joined + kernels.block(4 * window))


def _window(count: int, times: int | None, window_bytes: int | None, each: int) -> int:
    """Elements of a window."""
    size = -(-count // times) if times else max(1, (window_bytes or 0) // max(1, each))
    return -(-size // _GRID) * _GRID


def _sum(kernels: Kernels, sizes: Sequence[int], item: int) -> int:
    counted = Counter(sizes)
    return sum(times * kernels.block(size * item) for size, times in counted.items())
