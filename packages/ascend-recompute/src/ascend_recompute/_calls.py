"""How a call is written down so that it can be repeated in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_core.layout import Layout, read
from ascend_core.rng import RngState
from ascend_core.saved import Frame, PackedParameter
from ascend_recompute._nodes import name
from ascend_recompute._recipe import Operand
from ascend_recompute.policy import CASTS, DROPOUT

Operator = Callable[..., Any]

_CONSTANTS = (
    bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
_NO_CONSTANT = object()


class Call(NamedTuple):
    """A call as it is repeated.

    Attributes:
        function: The callable.
        values: Its arguments, those by position first; an `Operand` stands for each tensor.
        names: The names of the last arguments, which are passed by keyword.
    """

    function: Operator
    values: tuple[Any, ...]
    names: tuple[str, ...]


def random_state_before(function: Operator, args: tuple[Any, ...]) -> RngState | None:
    """The random state that a call is about to use.

    None for dropout on CPU, whose mask is saved by its own node and serves as well.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if function in DROPOUT and all(tensor.is_cpu for tensor in tensors):
        return None
    return RngState.capture({tensor.device for tensor in tensors if not tensor.is_cpu})


def write_down(
    frame: Frame, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Call | None:
    """Write down a call that has just returned; None when it cannot be repeated."""
    values = (*args, *kwargs.values()) if kwargs else args
    storage = output.untyped_storage()
    written: list[Any] = []
    for value in values:
        if not isinstance(value, Tensor):
            constant = _constant(value)
            if constant is _NO_CONSTANT:
                return None
            written.append(constant)
            continue
        if not Layout.fits(value) or not (value.requires_grad or _has_version(value)):
            return None
        record = frame.table.track(value)
        if record() is storage:  # a view, or the input itself: nothing was made
            return None
        written.append(Operand.of(value, record))
    call = Call(function, tuple(written), tuple(kwargs))
    return _cast(call, values, output) if function in CASTS else call


def with_saved_mask(frame: Frame, call: Call, own: range, output: Tensor) -> Call | None:
    """Dropout as a product with the scaled mask, when its node saved just that.

    On CPU `at::dropout` is a product with a mask of zeros and 1 / (1 - p), which the product's
    node saves; multiplying again gives the same bits and draws nothing.
    """
    record = frame.latest
    if record is None or len(own) != 1 or name(output.grad_fn) != "MulBackward0":
        return None
    mask = record.latest()
    if mask is None or mask.serial not in own or isinstance(mask, PackedParameter):
        return None
    layout = mask.layout if mask.layout is not None else read(mask.alias)
    if (layout.size, layout.dtype) != (output.size(), output.dtype):
        return None
    (dropped,) = (value for value in call.values if isinstance(value, Operand))
    return Call(torch.mul, (dropped, Operand((record, mask.version, *layout))), ())


def _cast(call: Call, values: tuple[Any, ...], output: Tensor) -> Call | None:
    """A cast as it can be repeated: on one device, and without the tensor that named the dtype."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or tensors[0].device != output.device:
        return None
    if len(tensors) == 1:
        return call
    if len(values) != 2:  # `x.to(other, copy=True)` and the like
        return None
    source, _ = call.values
    return Call(Tensor.to, (source, output.dtype), ())  # `x.type_as(other)`, `x.to(other)`


def _constant(value: Any) -> Any:
    """The value, as it will still be in backward; `_NO_CONSTANT` when nobody can promise that."""
    if isinstance(value, _CONSTANTS):
        return value
    if type(value) in (list, tuple):
        items = tuple(_constant(item) for item in value)
        return _NO_CONSTANT if any(item is _NO_CONSTANT for item in items) else items
    return _NO_CONSTANT


def _has_version(tensor: Tensor) -> bool:
    """Whether writes to it can be noticed; not so for tensors made in inference mode."""
    return not tensor.is_inference()
