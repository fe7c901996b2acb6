"""Walks an autograd graph and reads what it saved, without running anybody's unpack hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Saved", "graph_nodes", "saved_by"]

_RAW = "_raw_saved_"


class Saved(NamedTuple):
    """One value that a node of an autograd graph holds.

    Attributes:
        node: Name of the node, e.g. `"AddmmBackward0"`.
        field: What the node calls it, e.g. `"mat1"`.
        value: The saved tensor itself, or whatever a pack hook returned in its place.
    """

    node: str
    field: str
    value: object


def graph_nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the graphs that end in `tensors`, each once."""
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen: set[Any] = (
        set()
    )  # holds the nodes too: a node's Python object lives as long as it is held
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(below for below, _ in node.next_functions if below is not None)


def saved_by(nodes: Iterable[Any]) -> Iterator[Saved]:
    """Yield what `nodes` hold for backward.

    Reads `SavedTensor.data`, which is the saved tensor, or the object that a pack hook made of
    it: no unpack hook runs, and a graph that was freed by its backward yields nothing. Nodes of
    C++ extensions that do not publish what they save are not seen.
    """
    fields_of: dict[type, tuple[str, ...]] = {}
    for node in nodes:
        kind = type(node)
        if kind not in fields_of:
            fields_of[kind] = tuple(name for name in dir(node) if name.startswith(_RAW))
        for field in fields_of[kind]:
            for value in _read(node, field):
                yield Saved(node.name(), field.removeprefix(_RAW), value)


def _read(node: Any, field: str) -> list[object]:
    try:
        found = getattr(node, field)
    except RuntimeError:  # a custom Function whose saved tensors were freed
        return []
    group = found if isinstance(found, (tuple, list)) else (found,)
    values = [one.data for one in group if one is not None]
    return [value for value in values if value is not None]
