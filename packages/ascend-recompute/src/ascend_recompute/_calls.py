"""How a call is written down so that it can be repeated in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascend_core.layout import Layout
from ascend_core.rng import RngState
from ascend_core.saved import Frame, PackedParameter
from ascend_recompute._nodes import has_edge, leads_to, name
from ascend_recompute._recipe import Made, Operand
from ascend_recompute.fused import FusedActivation
from ascend_recompute.policy import CASTS, DROPOUT

Operator = Callable[..., Any]

_CONSTANTS = (
    bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format, FusedActivation,
)  # fmt: skip
_NO_CONSTANT = object()
# Reaches of long chains are cut: what is forgotten is not rebuilt, and stays as in the plain run.
_LONGEST_REACH = 64


def random_state_before(function: Operator, values: tuple[Any, ...]) -> RngState | None:
    """The random state that a call is about to use.

    None for dropout on CPU, whose mask is saved by its own node and serves as well.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if function in DROPOUT and all(tensor.is_cpu for tensor in tensors):
        return None
    return RngState.capture({tensor.device for tensor in tensors if not tensor.is_cpu})


def write_down(
    frame: Frame,
    function: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
    own: range,
) -> Made | None:
    """Write down a call that has just returned; None when it cannot be repeated.

    Args:
        frame: Knows the storages.
        function: What was called.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        output: What it returned.
        own: The serials of what was saved during the call.
    """
    values = (*args, *kwargs.values()) if kwargs else args
    storage = output.untyped_storage()
    written: list[Any] = []
    reach: tuple[range, ...] = (own,) if own else ()
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
        operand = Operand.of(value, record)
        written.append(operand)
        if record.made is not None:
            reach = _with_reach_behind(reach, operand, value, output)
    made = Made(function, tuple(written), tuple(kwargs), own, reach[-_LONGEST_REACH:])
    return _as_repeatable_cast(made, values, output) if function in CASTS else made


def use_saved_mask(frame: Frame, made: Made, output: Tensor) -> bool:
    """Make dropout a product with its scaled mask, when its node saved just that.

    On CPU `at::dropout` is a product with a mask of zeros and 1 / (1 - p), which the product's
    node saves; multiplying again gives the same bits and draws nothing.

    Returns:
        Whether that could be done.
    """
    record = frame.latest
    if record is None or len(made.own) != 1 or name(output.grad_fn) != "MulBackward0":
        return False
    mask = record.latest()
    if mask is None or mask.serial not in made.own or isinstance(mask, PackedParameter):
        return False
    scaled = Operand.of_saved(mask, record)
    if (scaled.layout.size, scaled.layout.dtype) != (output.size(), output.dtype):
        return False
    (dropped,) = made.operands()
    made.function, made.names = torch.mul, ()
    made.values = (dropped, scaled)
    return True


def _with_reach_behind(
    reach: tuple[range, ...], operand: Operand, value: Tensor, output: Tensor
) -> tuple[range, ...]:
    """Add the reach of the call that made an operand, when an edge leads from one to the other."""
    made = operand.made
    if made is None or not made.reach or not (has_edge(output, value) and leads_to(value, made)):
        return reach
    return made.reach + tuple(serials for serials in reach if serials not in made.reach)


def _as_repeatable_cast(made: Made, values: tuple[Any, ...], output: Tensor) -> Made | None:
    """A cast as it can be repeated: on one device, and without the tensor that named the dtype."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or tensors[0].device != output.device:
        return None
    if len(tensors) == 1:
        return made
    if len(values) != 2:  # `x.to(other, copy=True)` and the like
        return None
    made.function, made.names = Tensor.to, ()  # `x.type_as(other)`, `x.to(other)`
    made.values = (made.values[0], output.dtype)
    return made


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
