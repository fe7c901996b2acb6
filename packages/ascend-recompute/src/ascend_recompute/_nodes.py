"""What is noted on autograd nodes, and how one node leads to another."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ascend_core.layout import Layout
from ascend_recompute._recipe import Made

_KEY = "ascend_recompute"
_FLATTENS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
# So many nodes are followed back: the views of an output, or the parts of a composite operator.
_LONGEST_CHAIN = 8


class Cast(NamedTuple):
    """A cast in the graph between a saved tensor and the recorded call whose output was cast."""

    node: Any
    of: Made
    flattened: bool


def note(node: Any, made: Made) -> None:
    """Note a recorded call on its node; the note lives as long as the node."""
    node.metadata[_KEY] = made


def noted(node: Any) -> Made | None:
    """The call that was noted on a node."""
    made: Made | None = None if node is None else node.metadata.get(_KEY)
    return made


def name(node: Any) -> str:
    """The node's name; empty for no node."""
    return "" if node is None else str(node.name())


def leads_to(tensor: Tensor, made: Made) -> bool:
    """Whether the tensor's graph leads to the node of a call, by way of views of its output.

    Not so for a leaf that was made of the output by `detach().requires_grad_()`.
    """
    node: Any = tensor.grad_fn
    for _ in range(_LONGEST_CHAIN):
        if node is None:
            return False
        found = node.metadata.get(_KEY)
        if found is not None:
            return found is made
        node = _only_one_behind(node)
    return False


def has_edge(output: Tensor, operand: Tensor) -> bool:
    """Whether the output's graph leads to an operand; `type_as(other)` asks none of `other`."""
    node: Any = output.grad_fn
    target = operand.grad_fn
    for _ in range(_LONGEST_CHAIN):
        if node is None or target is None:
            return False
        if any(behind is target for behind, _ in node.next_functions):
            return True
        node = _only_one_behind(node)
    return False


def cast_of_a_call(tensor: Tensor) -> Cast | None:
    """The cast that made a saved tensor, when what was cast is a recorded call's output."""
    node: Any = tensor.grad_fn
    flattened = False
    while name(node) in _FLATTENS:
        node, flattened = _only_one_behind(node), True
    if name(node) != "ToCopyBackward0":
        return None
    made = noted(_only_one_behind(node))
    return None if made is None else Cast(node, made, flattened)


def kept_strides(tensor: Tensor, layout: Layout, *, flattened: bool) -> bool:
    """Whether the cast that `tensor` shows has the strides of what was cast."""
    if tensor.untyped_storage().nbytes() != layout.size.numel() * tensor.element_size():
        return False
    if not flattened:
        return tensor.size() == layout.size and tensor.stride() == layout.stride
    return tensor.is_contiguous() and _is_contiguous(layout)


def _only_one_behind(node: Any) -> Any:
    behind = [following for following, _ in node.next_functions if following is not None]
    return behind[0] if len(behind) == 1 else None


def _is_contiguous(layout: Layout) -> bool:
    expected = 1
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
