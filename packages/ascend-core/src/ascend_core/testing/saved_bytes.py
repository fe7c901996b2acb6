"""Measures what a forward pass holds for its backward, by the byte and by the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ascend_core.memory._census import storage_of
from ascend_core.memory._graph import graph_nodes, saved_by
from ascend_core.memory.measure import measure_peak

__all__ = ["SavedStorage", "held_bytes", "saved_storages"]


def held_bytes(fn: Callable[[], Any], *, device: torch.device | str | None = None) -> int:
    """Measure the bytes that a forward pass leaves in use while its result is alive.

    Counts everything that `fn` allocated and did not free: what the graph saved for backward and
    the result itself. The truth of `measure_peak`: on CPU the profiler's memory events, on other
    devices the allocator's `active_bytes`.

    Args:
        fn: Runs the forward pass and returns what keeps its graph alive, e.g. the loss.
        device: What to measure; the current accelerator when there is one, else the CPU.

    Returns:
        Bytes in use after `fn`, with its result still alive, less those before it.
    """
    with measure_peak(device) as memory:
        result = fn()
    del result
    return memory.held_bytes


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """One storage that an autograd graph holds, and who saved it.

    Attributes:
        nbytes: Size of the whole storage in bytes, of which the nodes may use a part.
        saved_as: `(node, field)` of each save of it, e.g. `("AddmmBackward0", "mat1")`.
        is_leaf: Whether a leaf that requires grad (a parameter, an input) lives in the storage.
    """

    nbytes: int
    saved_as: tuple[tuple[str, str], ...]
    is_leaf: bool


def saved_storages(*outputs: torch.Tensor) -> list[SavedStorage]:
    """List the storages that the graphs of `outputs` hold for backward, each once.

    No unpack hook runs. Where a pack hook returned a tensor, that tensor counts; what a pack hook
    returned otherwise, what custom Functions keep as plain attributes, and what nodes of C++
    extensions hold is not listed: `held_bytes` sees it all.

    Args:
        outputs: Tensors whose graphs are walked.

    Returns:
        The storages, largest first.
    """
    nodes = list(graph_nodes(outputs))
    leaves = _storages(node.variable for node in nodes if hasattr(node, "variable"))
    sizes: dict[int, int] = {}
    saved_as: dict[int, list[tuple[str, str]]] = {}
    kept_alive = []  # an address stays its storage's own while the storage lives
    for saved in saved_by(nodes):
        storage = storage_of(saved.value) if isinstance(saved.value, torch.Tensor) else None
        if storage is None:
            continue
        kept_alive.append(storage)
        sizes[storage._cdata] = storage.nbytes()
        saved_as.setdefault(storage._cdata, []).append((saved.node, saved.field))
    found = [SavedStorage(sizes[key], tuple(saved_as[key]), key in leaves) for key in sizes]
    return sorted(found, key=lambda storage: -storage.nbytes)


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    found = (storage_of(tensor) for tensor in tensors)
    return {storage._cdata for storage in found if storage is not None}
