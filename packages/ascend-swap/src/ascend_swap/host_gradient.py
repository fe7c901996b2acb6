"""A gradient whose values wait on the host, as the tensor that stands in `.grad`.

[Note: a stand-in]
Who looks at `.grad` of a parameter whose gradient was moved should see that gradient, and who drops
it should drop it. So `.grad` holds a tensor of its shape, dtype and device without memory there, a
`HostGradient`. It owns the values on the host, and they live as long as it does: `.grad = None`,
by whomever, frees them.

Every operator on it comes to `__torch_dispatch__`. One that reads is given the values, brought to
the device for it; one that writes is given them, and what it wrote goes back. Autograd's own `+=`
for the next micro-batch is such a one. Two are answered without moving anything: zero, and a
multiplication by one number, which is noted and done when the values are next read. Views are
refused: they would be of a copy, and what is written to them would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ascend_core.errors import FeatureError
from ascend_core.layout import Layout
from ascend_core.streams import Event
from ascend_core.transfer import Transfer

__all__ = ["HostGradient", "HostValues"]

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_ZERO = (_aten.zero_.default, _aten._foreach_zero_.default)
_MULTIPLY = (_aten.mul_.Tensor, _aten._foreach_mul_.Tensor)


class HostValues:
    """The values of a gradient on the host.

    Args:
        transfer: What moves them.
        gradient: The gradient, dense, on the device. It may be dropped; its way out has begun.

    Attributes:
        layout: Its layout.
        factors: What the values are still to be multiplied by, in this order; each 0-d.
        version: Counts what was written.
    """

    def __init__(self, transfer: Transfer, gradient: torch.Tensor) -> None:
        self._transfer = transfer
        self._copy = transfer.to_host(gradient)
        self.layout: Layout = self._copy.layout
        self.factors: tuple[torch.Tensor, ...] = ()
        self.version = 0

    @property
    def device(self) -> torch.device:
        """Where they come from."""
        return self._transfer.device

    @property
    def last_use(self) -> tuple[Event, ...]:
        """The last copy that was queued from or to the host memory."""
        return self._copy.last_use

    def stored(self) -> torch.Tensor:
        """The host memory, without `factors`: [numel]. Does not wait for `last_use`."""
        return self._copy.stored()

    def fetch(self) -> torch.Tensor:
        """A copy on the device. Makes the current stream wait for it."""
        values = self._copy.fetch().wait()
        for factor in self.factors:
            values.mul_(factor)
        return values

    def replace(self, gradient: torch.Tensor) -> None:
        """Store other values, of the same layout. Does not block the host."""
        self._copy = self._transfer.to_host(gradient)
        self.factors = ()
        self.version += 1

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply by a number (0-d) when they are next read."""
        self.factors = (*self.factors, factor.detach().clone())
        self.version += 1

    def set_to_zero(self) -> None:
        """Write zeros. Blocks the host until no copy is under way."""
        self._copy.on_host().zero_()
        self.factors = ()
        self.version += 1


class HostGradient(torch.Tensor):
    """Stands in `.grad` for a gradient on the host, and takes no memory of the device.

    Args:
        values: The gradient.

    Attributes:
        host: The gradient.
    """

    host: HostValues

    @staticmethod
    def __new__(cls: type[HostGradient], values: HostValues) -> HostGradient:
        """Make a tensor without memory."""
        layout = values.layout
        make: Any = torch.Tensor._make_wrapper_subclass
        made: HostGradient = make(
            cls, layout.size, strides=layout.stride, dtype=layout.dtype, device=values.device
        )
        made.host = values
        return made

    def __init__(self, values: HostValues) -> None:
        """All is done by then."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Its form alone: for the values torch would bring them to the device."""
        return f"HostGradient({list(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer an operator that was given one of these, or several.

        Raises:
            FeatureError: When it would make a view.
        """
        return _answer(func, args, dict(kwargs or {}))


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in _SAME:
        return HostGradient(args[0].host)
    if func.is_view or torch.Tag.inplace_view in func.tags:
        raise FeatureError(
            f"{func.name()} was called on a gradient that is on the host.",
            why="a view of it would be a view of a copy, and what is written there would be lost.",
            instead="work on gradient.clone(), or use release_grads instead of offload_gradients.",
        )
    if args and isinstance(args[0], (list, tuple)) and "_foreach_" in func.name():
        return _one_by_one(func, args, kwargs)
    if _needs_no_values(func, args[0], args):
        return args[0]
    return _with_values(func, args, kwargs)


def _needs_no_values(func: Any, target: object, args: tuple[Any, ...]) -> bool:
    """Do what can be done without moving the values of `target`, if that is all."""
    if not isinstance(target, HostGradient):
        return False
    if func in _ZERO:
        target.host.set_to_zero()
        return True
    factor = args[1] if func in _MULTIPLY else None
    if type(factor) is torch.Tensor and factor.dim() == 0 and factor.device == target.device:
        target.host.multiply(factor)
        return True
    return False


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer an operator on lists for one element after another: one is on the device at a time."""
    count = len(args[0])
    results: list[Any] = []
    for i in range(count):
        one = [[a[i]] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args]
        if not _needs_no_values(func, args[0][i], args):
            result = _with_values(func, tuple(one), kwargs)
            results.extend(result or ())
    return results if func._schema.returns else None


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring the values to the device, run the operator, and take back what it wrote."""
    fetched: dict[int, tuple[HostGradient, torch.Tensor]] = {}

    def bring(value: Any) -> Any:
        if not isinstance(value, HostGradient):
            return value
        if id(value) not in fetched:
            fetched[id(value)] = value, value.host.fetch()
        return fetched[id(value)][1]

    result = func(*_pytree.tree_map(bring, args), **_pytree.tree_map(bring, kwargs))
    for value in _written(func, args, kwargs):
        if isinstance(value, HostGradient):
            value.host.replace(fetched[id(value)][1])
    back = {id(there): here for here, there in fetched.values()}
    return _pytree.tree_map(lambda value: back.get(id(value), value), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)
