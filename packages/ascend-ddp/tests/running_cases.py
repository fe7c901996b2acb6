"""What the ranks of a test of cases do: run all, one behind the other."""

from __future__ import annotations

import gc
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

Case = Callable[[int, int], None]


def are_gone(seen: Sequence[weakref.ref[Any]]) -> bool:
    """Whether nothing keeps these, in a moment.

    An accelerator's backward runs in a thread of autograd's own, which may let go of the graph
    after backward has returned.
    """
    for _ in range(1000):
        gc.collect()
        if all(one() is None for one in seen):
            return True
        time.sleep(0.01)
    return False


def run_cases(rank: int, cases: Mapping[str, Case], device: str = "cpu") -> dict[str, str]:
    """Run each with the rank and the number of ranks; return the tracebacks of those that raised.

    Args:
        rank: This one.
        cases: By name; all ranks have the same, in one order.
        device: On which the cases make their tensors.
    """
    failed = {}
    for name, function in cases.items():
        torch.manual_seed(0)
        try:
            with torch.device(device):
                function(rank, distributed.get_world_size())
        except Exception:
            failed[name] = traceback.format_exc()
        distributed.barrier()
    return failed
