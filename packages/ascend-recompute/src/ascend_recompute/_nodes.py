"""What is noted on autograd nodes, and how one node leads to another."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from ascend_core.layout import Layout
from ascend_recompute._recipe import Made

_KEY = "ascend_recompute"
_FLATTENS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
# So many nodes are followed back: the views of an output, or the parts of a composite operator.
_LONGEST_CHAIN = 8


class OnNode(NamedTuple):
    """What is noted on the node of a recorded call; it lives as long as the node.

    Attributes:
        recorder: Who recorded the call.
        made: The call.
        probe: Under autocast, shares the version counter of the output.
    """

    recorder: weakref.ref[Any]
    made: Made
    probe: Tensor | None


class Cast(NamedTuple):
    """A cast in the graph between a saved tensor and the recorded call whose output was cast."""

    node: Any
    of: OnNode
    flattened: bool


def note(node: Any, on_node: OnNode) -> None:
    """Note a call on its node."""
    node.metadata[_KEY] = on_node


def noted(node: Any) -> OnNode | None:
    """What was noted on a node."""
    on_node = None if node is None else node.metadata.get(_KEY)
    return on_node if isinstance(on_node, OnNode) else None


def name(node: Any) -> str:
    """The node's name; empty for no node."""
    return "" if node is None else str(node.name())


def leads_to(tensor: Tensor, made: Made) -> bool:
    """Whether the tensor's graph leads to the node of a call, by way of views of its output.

    Not so for a leaf that was made of the output by `detach().requires_grad_()`.
    """
    node: Any = tensor.grad_fn
    for _ in range(_LONGEST_CHAIN):
        on_node = noted(node)
        if node is None or on_node is not None:
            return on_node is not None and on_node.made is made
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
    on_node = noted(_only_one_behind(node))
    return None if on_node is None else Cast(node, on_node, flattened)


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
