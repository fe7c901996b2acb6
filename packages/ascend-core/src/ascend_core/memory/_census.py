"""Finds the tensor storages that are alive already, and notices when they die."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from ascend_core.memory._graph import graph_nodes, saved_by

__all__ = ["Census", "reachable_tensors", "storage_of"]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage under `tensor`; None where there is none (fake, sparse or wrapped tensors)."""
    with torch._C.DisableTorchFunction():  # looking is no operation that a mode should see
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == "meta":
                return None
            storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            return None
    return storage


def reachable_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors that Python objects, gradients and autograd graphs hold (some twice).

    Tensors that only C++ code outside of autograd holds cannot be found.
    """
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    with torch._C.DisableTorchFunction():
        gradients = [tensor.grad for tensor in found if tensor.is_leaf]
        saved = [one.value for one in saved_by(graph_nodes(found))]
    yield from found
    yield from (gradient for gradient in gradients if gradient is not None)
    yield from (value for value in saved if isinstance(value, torch.Tensor))


class Census:
    """The CPU storages from torch's allocator that are alive now, and the time each one dies.

    [Note: storages from before]
    The profiler names the frees of those blocks only whose allocation it saw. Blocks from before
    are therefore listed once, up front, and a weak reference on each storage object (which
    PyTorch keeps for as long as the storage lives, also when only autograd holds it) notes the
    moment of its death. Memory of numpy arrays, mapped files and shared memory does not come from
    the allocator; neither its coming nor its going is counted.

    Args:
        tensors: Where to look; every tensor that can be reached when left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        self.deaths: list[tuple[int, int]] = []
        self._watched: dict[weakref.ref[torch.UntypedStorage], tuple[int, int]] = {}
        self._seen: set[int] = set()
        for tensor in reachable_tensors() if tensors is None else tensors:
            self._watch(tensor)
        self.bytes_alive = sum(size for size, _ in self._watched.values())

    def close(self) -> list[tuple[int, int]]:
        """Stop watching.

        Returns:
            `(time in ns since the epoch, bytes)` of each storage that died since the census, and,
            timed now, of each one that was resized, since its first block is gone.
        """
        now = time.time_ns()
        for reference, (size, address) in self._watched.items():
            storage = reference()
            if storage is not None and storage.data_ptr() != address:
                self.deaths.append((now, size))
        self._watched.clear()
        return self.deaths

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._seen or not _from_cpu_allocator(storage):
            return
        self._seen.add(storage._cdata)
        size = storage.nbytes()
        note = partial(self._note_death, size)
        self._watched[weakref.ref(storage, note)] = (size, storage.data_ptr())

    def _note_death(self, size: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if self._watched.pop(reference, None) is not None:
            self.deaths.append((time.time_ns(), size))


def _from_cpu_allocator(storage: torch.UntypedStorage) -> bool:
    return (
        storage.device.type == "cpu"
        and storage.nbytes() > 0
        and storage.resizable()
        and not storage.is_shared()
    )
