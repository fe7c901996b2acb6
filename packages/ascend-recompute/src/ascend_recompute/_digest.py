"""A number that tells one tensor's bits from another's."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that multiplying by it loses no bit; from Knuth's multiplicative hashing.
_FACTOR = 2654435761


def digest(tensor: Tensor) -> Tensor:
    """Sum the elements' bits, each times an odd number that depends on its place, modulo 2**64.

    Args:
        tensor: Strided, of any shape and dtype. Read once; needs 16 bytes for each element while
            it runs.

    Returns:
        An int64 of no dimensions on the tensor's device; the host does not wait for it.
    """
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
        places = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64)
        return bits.mul_(places.mul_(2 * _FACTOR).add_(1)).sum()
