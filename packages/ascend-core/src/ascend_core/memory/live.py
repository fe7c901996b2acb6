"""Says who holds the memory: which module, and as what."""

from __future__ import annotations

import dataclasses
import enum
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascend_core.device import device_of
from ascend_core.memory._census import reachable_tensors, storage_of
from ascend_core.memory._graph import graph_nodes, saved_by
from ascend_core.saved import backward_runs

__all__ = ["BACKWARD", "OUTSIDE", "Kind", "LiveStorage", "LiveStorages", "track_live"]

OUTSIDE = "(outside)"
"""Where a storage was born when no module of the model was running."""
BACKWARD = "(backward)"
"""Where a storage was born when a backward pass was running, and no module within it."""


class Kind(enum.StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    SAVED_ACTIVATION = "saved activation"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class LiveStorage:
    """One storage that is alive.

    Attributes:
        nbytes: Its size in bytes now.
        kind: What it is for.
        module: The module that owns the parameter that it belongs to, or whose forward made it;
            `""` is the model itself, beside `OUTSIDE` and `BACKWARD`.
        operator: What made it, e.g. `"aten.gelu"`; empty when it is older than the tracking.
    """

    nbytes: int
    kind: Kind
    module: str
    operator: str


@dataclasses.dataclass(frozen=True)
class _Birth:
    storage: weakref.ref[torch.UntypedStorage]
    module: str
    operator: str


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages of one device that are alive, each with its birth place. Made by `track_live`.

    [Note: what is tracked]
    Every operator's outputs on the thread that tracks (and on autograd's threads), beside what
    Python, gradients and graphs could reach at the start. Held weakly: tracking keeps nothing
    alive. A kernel's scratch memory never becomes a tensor and is not seen, so peaks belong to
    `measure_peak`; between operators, the sums of both are equal.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._running: list[str] = []
        self._births: dict[int, _Birth] = {}
        for tensor in reachable_tensors():
            self._note(tensor, OUTSIDE, "")

    def snapshot(self) -> list[LiveStorage]:
        """List what is alive now. Walks every object that Python tracks: about 0.1 s."""
        owned = self._owned()
        saved = self._saved()
        found = []
        for key, birth in list(self._births.items()):
            storage = birth.storage()
            if storage is None or storage.nbytes() == 0:
                continue
            default = Kind.SAVED_ACTIVATION if key in saved else Kind.OTHER
            kind, module = owned.get(key, (default, birth.module))
            found.append(LiveStorage(storage.nbytes(), kind, module, birth.operator))
        return found

    def by_kind(self) -> dict[Kind, int]:
        """Bytes alive now by kind; every kind is there."""
        sizes = Counter[Kind]()
        for storage in self.snapshot():
            sizes[storage.kind] += storage.nbytes
        return {kind: sizes[kind] for kind in Kind}

    def by_module(self, kind: Kind | None = None) -> dict[str, int]:
        """Bytes alive now by module, the largest first; of one kind only when it is given."""
        sizes = Counter[str]()
        for storage in self.snapshot():
            if kind is None or storage.kind == kind:
                sizes[storage.module] += storage.nbytes
        return dict(sizes.most_common())

    @property
    def total(self) -> int:
        """Bytes alive now."""
        storages = (birth.storage() for birth in list(self._births.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor):
                self._note(output, self._place(), str(func._overloadpacket))
        return result

    def _place(self) -> str:
        if self._running:
            return self._running[-1]
        return BACKWARD if backward_runs() else OUTSIDE

    def _note(self, tensor: torch.Tensor, module: str, operator: str) -> None:
        storage = storage_of(tensor)
        if storage is None or storage.device != self._device or storage._cdata in self._births:
            return
        key = storage._cdata
        # The address may serve another storage afterwards, so the entry goes when this one does.
        reference = weakref.ref(storage, lambda _: self._births.pop(key, None))
        self._births[key] = _Birth(reference, module, operator)

    def _owned(self) -> dict[int, tuple[Kind, str]]:
        """The kind and module of each storage that belongs to a parameter or buffer."""
        owned: dict[int, tuple[Kind, str]] = {}

        def claim(tensor: torch.Tensor, kind: Kind, name: str) -> None:
            storage = storage_of(tensor)
            if storage is not None:
                owned.setdefault(storage._cdata, (kind, name.rpartition(".")[0]))

        for name, parameter in self._model.named_parameters():
            claim(parameter, Kind.PARAMETER, name)
            if parameter.grad is not None:
                claim(parameter.grad, Kind.GRADIENT, name)
        for name, buffer in self._model.named_buffers():
            claim(buffer, Kind.BUFFER, name)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        states = self._optimizer.state if self._optimizer is not None else {}
        for owner, state in states.items():
            for tensor in tree_leaves(state):
                if isinstance(tensor, torch.Tensor):
                    claim(tensor, Kind.OPTIMIZER_STATE, names.get(id(owner), OUTSIDE + "."))
        return owned

    def _saved(self) -> set[int]:
        """Which storages the graphs that Python can reach hold, through pack hooks too."""
        nodes = graph_nodes(list(reachable_tensors()))
        found = set()
        for saved in saved_by(nodes):
            for tensor in _tensors_in(saved.value):
                storage = storage_of(tensor)
                if storage is not None:
                    found.add(storage._cdata)
        return found

    def _hooks(self) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for name, module in self._model.named_modules():

            def enter(_module: nn.Module, _args: Any, name: str = name) -> None:
                self._running.append(name)

            def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
                self._running.pop()

            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave, always_call=True)


_NEVER_ENTERED = (nn.Module, type, ModuleType, FunctionType)


def _tensors_in(packed: object, depth: int = 4) -> Iterator[torch.Tensor]:
    """Yield the tensors within what a pack hook returned, a few references deep."""
    if isinstance(packed, torch.Tensor):
        yield packed
    elif depth and not isinstance(packed, _NEVER_ENTERED):
        for part in gc.get_referents(packed):
            yield from _tensors_in(part, depth - 1)


@contextmanager
def track_live(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> Iterator[LiveStorages]:
    """Track which storages live while a block runs, and who they belong to.

    Collects garbage first. Puts hooks on every module of the model, and a dispatch mode on the
    calling thread; removes both when the block ends.

        with track_live(model, optimizer) as live:
            loss = model(x).sum()
            print(live.by_kind()[Kind.SAVED_ACTIVATION], live.by_module())

    Args:
        model: Its modules are the places to attribute to.
        optimizer: Its `state` counts as optimizer state.
        device: Where to track; the model's device when left out.

    Yields:
        The storages, to be asked at any moment of the block; empty after it.
    """
    gc.collect()
    live = LiveStorages(model, optimizer, device_of(model if device is None else device))
    handles = list(live._hooks())
    try:
        with live:
            yield live
    finally:
        for handle in handles:
            handle.remove()
        live._births.clear()
