"""What belongs to a model and therefore never moves: its parameters and its buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ascend_core.device import current_backend
from ascend_core.layout import Layout

__all__ = ["Belongings", "BelongingsOf"]


class Belongings:
    """The storages of parameters and buffers at one call, and what looks like a copy of one.

    [Note: a cast of a frozen weight]
    Under autocast a frozen weight is saved as a copy of another dtype, which has neither its
    storage nor a graph that leads to it. All that is left of it is its shape: so a tensor of that
    shape that no graph made stays where it is.

    [Note: parameters that come and go]
    Where parameters are sharded over ranks, they are gathered within the call, and what is
    registered before is a shard of the same shape. A gathered one is a parameter again, and views
    know what they were taken from.

    Args:
        tensors: Parameters and buffers.
        kind: The type of device that the model is on.
    """

    def __init__(self, tensors: Sequence[Tensor], kind: str) -> None:
        self._kind = kind
        self._storages: set[int] = set()
        self._frozen: set[tuple[int, ...]] = set()
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        for tensor in tensors:
            if Layout.fits(tensor) and not is_functorch_wrapped_tensor(tensor):
                self._storages.add(tensor.untyped_storage()._cdata)
            if casts and not tensor.requires_grad:
                self._frozen.add(_shape(tensor))

    def include(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of one of them, may be a cast of one, or is elsewhere.

        A tensor of the device "meta" is nowhere.
        """
        return (
            tensor.device.type != self._kind
            or tensor.is_meta
            or tensor.untyped_storage()._cdata in self._storages
            or isinstance(tensor._base, nn.Parameter)
            or (
                bool(self._frozen)
                and _is_made_by_nothing(tensor)
                and _shape(tensor) in self._frozen
            )
        )


class BelongingsOf:
    """Finds what belongs to a module at each of its calls. Holds none of it.

    Args:
        module: The module that is called.
        model: The whole of it; asked for the device where the module has no tensor of its own.
    """

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self._parts = [weakref.ref(part) for part in module.modules()]
        self._model = weakref.ref(model)

    def now(self) -> Belongings:
        """What belongs to it at this moment."""
        own = [tensor for part in self._parts for tensor in _registered(part())]
        model = self._model()
        some = own[0] if own or model is None else next(model.parameters(), None)
        kind = current_backend().name if some is None else some.device.type
        return Belongings(own, kind)


def _registered(part: nn.Module | None) -> Iterator[Tensor]:
    if part is not None:
        for registered in (part._parameters, part._buffers):
            yield from (tensor for tensor in registered.values() if tensor is not None)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(sorted(tensor.shape))


def _is_made_by_nothing(tensor: Tensor) -> bool:
    return bool(tensor.is_leaf and not tensor.requires_grad)
