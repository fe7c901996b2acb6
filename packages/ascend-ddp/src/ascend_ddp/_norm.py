"""The norm of gradients of which each rank has its part."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed

__all__ = ["total_norm"]


def total_norm(
    grads: Iterable[Tensor],
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device,
    group: distributed.ProcessGroup | None,
) -> Tensor:
    """The norm over all ranks. A collective; each element counts once.

    Args:
        grads: Of this rank, on any devices.
        norm_type: Which norm; `math.inf` for the largest element.
        dtype: In which it is added up; no narrower than any gradient's, and the same on every rank.
        device: On which ranks talk.
        group: The ranks.

    Returns:
        0-d, of that dtype, on `device`, the same on every rank.
    """
    norms = [
        torch.linalg.vector_norm(g.abs() if g.is_complex() else g, norm_type, dtype=dtype).to(
            device
        )
        for g in grads
        if g.numel()
    ]
    total = torch.zeros((), dtype=dtype, device=device)
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if math.isinf(norm_type):
        distributed.all_reduce(total, distributed.ReduceOp.MAX, group)
    else:
        total.pow_(norm_type)
        distributed.all_reduce(total, group=group)
        total.pow_(1 / norm_type)
    return total
